//! What the types forbid does not compile, and the compiler says why.
//!
//! The compiler's words are kept beside each file. Where a newer compiler words them differently,
//! `TRYBUILD=overwrite` writes them anew: look that the error codes have stayed.

// With a feature the compiler names things by other paths.
#[cfg(not(any(feature = "cudarc", feature = "dlpack")))]
#[test]
fn what_the_types_forbid_does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}

#[cfg(feature = "dlpack")]
#[test]
fn what_the_types_of_tensors_forbid_does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail_dlpack/*.rs");
}
