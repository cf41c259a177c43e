//! Asks a driver library in C, case by case, and compares its answers with those of a GPU:
//! `conformance-c --library libcuda.so.1 --against FILE`.

fn main() -> std::process::ExitCode {
    conformance::c::run(std::env::args().skip(1))
}
