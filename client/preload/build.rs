//! Linker arguments for the preload library: no start files of the C library and no C library by name. It takes what it needs from the one
//! the program has, whatever its version.

fn main() {
    for argument in ["-nostartfiles", "-nostdlib", "-Wl,-Bsymbolic", "-Wl,-z,now"] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
    println!("cargo:rerun-if-changed=build.rs");
}
