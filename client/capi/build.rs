//! Links libpoolfs.so, like the preload library, without naming a C library of its own.

fn main() {
    for argument in ["-nostartfiles", "-nostdlib", "-Wl,-Bsymbolic", "-Wl,-z,now", "-Wl,-soname,libpoolfs.so"] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
    println!("cargo:rerun-if-changed=build.rs");
}
