//! Names the library as the driver's is named, so that a program that was linked with it looks for
//! `libcuda.so.1`.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo::rerun-if-changed=build.rs");
}
