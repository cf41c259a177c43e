//! Code that the types must reject does not compile, with the expected compiler errors.
//!
//! The expected output is stored beside each file. If a newer compiler words it differently, run
//! with `TRYBUILD=overwrite`, and check that the error codes are unchanged.

// With one of these features alone the compiler names items by other paths.
#[cfg(any(
    all(feature = "cudarc", feature = "dlpack"),
    not(any(feature = "cudarc", feature = "dlpack"))
))]
#[test]
fn what_the_types_forbid_does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}

// With other features the compiler names items by other paths.
#[cfg(all(feature = "cudarc", feature = "dlpack"))]
#[test]
fn what_the_types_of_slices_forbid_does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail_cudarc/*.rs");
}

#[cfg(feature = "dlpack")]
#[test]
fn what_the_types_of_tensors_forbid_does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail_dlpack/*.rs");
}
