//! Code that the types must reject does not compile, with the expected compiler errors.
//!
//! The expected output is stored beside each file. If a newer compiler words it differently, run
//! with `TRYBUILD=overwrite`, and check that the error codes are unchanged.

#[test]
fn what_the_types_forbid_does_not_compile() {
    let tests = trybuild::TestCases::new();
    for folder in ["types", "cudarc", "dlpack"] {
        tests.compile_fail(format!("tests/{folder}/*.rs"));
    }
}
