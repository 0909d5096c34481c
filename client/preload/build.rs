//! Links the library without the C library's start files and without naming a C library: it takes what it needs from the one
//! the program has, whatever its version.

fn main() {
    for argument in ["-nostartfiles", "-nostdlib", "-Wl,-Bsymbolic", "-Wl,-z,now"] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
    println!("cargo:rerun-if-changed=build.rs");
}
