//! Tests of the screen after a panic.

use super::{Screen, State};

#[allow(dead_code, unreachable_pub, reason = "other tests use the rest")]
mod pty {
    include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/pty.rs"));
}

/// Environment variable of the process that panics.
const IN_A_TERMINAL: &str = "CUVMM_TEST_PANICS";

#[test]
#[ignore = "a program of its own, started by another test"]
fn panics_on_the_screen() {
    let Ok(thread) = std::env::var(IN_A_TERMINAL) else {
        return;
    };
    let mut screen = Screen::open().unwrap();
    assert!(screen.draw(&State::default()).unwrap());
    let panics = || panic!("the end is near");
    if thread == "other" {
        let _ = std::thread::spawn(panics).join();
        assert!(!screen.draw(&State::default()).unwrap(), "it is restored");
        return;
    }
    panics();
}

#[test]
fn a_panic_of_any_thread_restores_the_terminal_and_is_told() {
    let binary = std::env::current_exe().unwrap();
    let binary = binary.to_str().unwrap();
    let test = "ledger::top::screen::tests::panics_on_the_screen";
    for (thread, code) in [("this", 101), ("other", 0)] {
        let variable = format!("{IN_A_TERMINAL}={thread}");
        let arguments = [
            &variable,
            binary,
            test,
            "--exact",
            "--ignored",
            "--nocapture",
        ];
        let (status, shown) = pty::Pty::start("env", &arguments, 200, 60).ended();
        assert_eq!(status.code(), Some(code), "{shown}");
        assert!(shown.contains("the end is near"), "{shown}");
    }
}
