//! Linker arguments for libpoolfs.so: no start files and no C library of its own, as for the preload library.

fn main() {
    for argument in ["-nostartfiles", "-nostdlib", "-Wl,-Bsymbolic", "-Wl,-z,now", "-Wl,-soname,libpoolfs.so"] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
    println!("cargo:rerun-if-changed=build.rs");
}
