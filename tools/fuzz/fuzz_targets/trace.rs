//! The reader of request traces on arbitrary bytes: it returns rows, or one line that names a line
//! of the input.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../lab/src/replay/instant.rs"]
mod instant;
#[allow(dead_code)]
#[path = "../../lab/src/replay/trace.rs"]
mod trace;

fuzz_target!(|bytes: &[u8]| {
    match trace::read(bytes) {
        Ok(rows) => {
            assert!(!rows.is_empty());
            assert!(rows.iter().all(|row| row.context >= 1));
        }
        Err(error) => {
            let said = error.to_string();
            assert!(!said.contains('\n'), "{said:?}");
            let line = said
                .strip_prefix("line ")
                .and_then(|rest| rest.split(':').next());
            let line: usize = line
                .and_then(|line| line.parse().ok())
                .expect("a line number");
            let lines = 1 + bytes
                .iter()
                .filter(|byte| matches!(byte, b'\n' | b'\r'))
                .count();
            assert!((1..=lines).contains(&line), "line {line} of {lines}");
        }
    }
});
