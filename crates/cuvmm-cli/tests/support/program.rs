//! The library's example `processes` as a program of its own: the test's binary runs again, with one
//! ignored test that is the example.

use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use super::own_process;

#[path = "../../../cuvmm/examples/processes.rs"]
mod processes;

/// The variables that say what the example is given.
const DIRECTORY: &str = "CUVMM_TEST_DIRECTORY";
const NAME: &str = "CUVMM_TEST_NAME";

/// The test that is the example.
const TEST: &str = "example_processes";

/// A program that is killed when it is dropped.
#[derive(Debug)]
pub(crate) struct Program(pub(crate) Child);

impl Program {
    /// Starts the example in a directory, under a name.
    pub(crate) fn start(directory: &Path, name: &str) -> Self {
        let mut command = own_process::only(TEST);
        let command = command.stdout(Stdio::null());
        let command = command.env(DIRECTORY, directory).env(NAME, name);
        Self(command.spawn().unwrap())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns a shell's command that runs the example with a directory and a name as arguments.
pub(crate) fn script() -> String {
    let command = own_process::only(TEST);
    let binary = command.get_program().display();
    let arguments: Vec<_> = command.get_args().filter_map(|it| it.to_str()).collect();
    let arguments = arguments.join(" ");
    format!("{DIRECTORY}=\"$1\" {NAME}=\"$2\" exec '{binary}' {arguments}")
}

/// Runs the example until it is killed, if its variables are set.
pub(crate) fn run() {
    let (Some(directory), Ok(name)) = (std::env::var_os(DIRECTORY), std::env::var(NAME)) else {
        return;
    };
    let pause = Duration::from_millis(200);
    processes::run(directory.as_ref(), &name, u32::MAX, pause).unwrap();
}
