//! Traces of allocations, and their form as lines.

use std::collections::HashSet;
use std::io::{BufRead, Read as _};

/// The most bytes of lines that are read.
const MOST: u64 = 4 << 30;

/// The most bytes of one line: numbers of 64 bits take fewer than a hundred.
const LONGEST: u64 = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Allocate { id: u64, size: u64, stream: u64 },
    Free { id: u64 },
}

/// Operations in order. Each allocation has its own ID and is freed at most once, later.
#[derive(Clone, Debug, Default)]
pub(super) struct Trace {
    pub(super) operations: Vec<Operation>,
}

/// Reads lines.
///
/// # Errors
/// A line is wrong; the error names it.
pub(super) fn parse(input: impl BufRead) -> Result<Trace, String> {
    let mut trace = Trace::default();
    let (mut seen, mut live) = (HashSet::new(), HashSet::new());
    let (mut input, mut bytes) = (input.take(MOST), Vec::new());
    for number in 1_u64.. {
        let wrong = |what: &str| format!("line {number}: {what}");
        bytes.clear();
        let line = input.by_ref().take(LONGEST).read_until(b'\n', &mut bytes);
        if line.map_err(|error| wrong(&error.to_string()))? == 0 {
            break;
        }
        if bytes.len() as u64 == LONGEST {
            return Err(wrong("it has 64 KiB or more"));
        }
        let line = str::from_utf8(&bytes).map_err(|_| wrong("it is no text in UTF-8"))?;
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let value = |word: &str| word.parse().map_err(|_| wrong("a number is needed"));
        let operation = match words[..] {
            [] => continue,
            ["a", id, size, stream] => {
                let (id, size, stream) = (value(id)?, value(size)?, value(stream)?);
                if size == 0 {
                    return Err(wrong("an allocation has at least one byte"));
                }
                if !seen.insert(id) {
                    return Err(wrong("this ID was allocated before"));
                }
                live.insert(id);
                Operation::Allocate { id, size, stream }
            }
            ["f", id] => {
                let id = value(id)?;
                if !live.remove(&id) {
                    return Err(wrong("this ID is not allocated"));
                }
                Operation::Free { id }
            }
            _ => return Err(wrong("`a ID BYTES STREAM` or `f ID` is needed")),
        };
        trace.operations.push(operation);
    }
    match trace.operations.is_empty() {
        true => Err("there is no operation in it".to_owned()),
        false => Ok(trace),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_operations() {
        let trace = parse("a 1 512 0\n\na 2 7 3\r\nf 1\n".as_bytes()).unwrap();
        let first = Operation::Allocate {
            id: 1,
            size: 512,
            stream: 0,
        };
        let second = Operation::Allocate {
            id: 2,
            size: 7,
            stream: 3,
        };
        assert_eq!(trace.operations, [first, second, Operation::Free { id: 1 }]);
    }

    #[test]
    fn a_wrong_line_is_named() {
        for (text, line) in [
            ("", "there is no operation"),
            ("a 1 5 0\nb", "line 2"),
            ("a 1 0 0", "line 1"),
            ("a 1 5 0\na 1 5 0", "line 2"),
            ("f 3", "line 1"),
            ("a 1 5 0\nf 1\nf 1", "line 3"),
            ("a 1 -5 0", "line 1"),
            ("f 1 \u{e9}", "line 1"),
        ] {
            let error = parse(text.as_bytes()).unwrap_err();
            assert!(error.contains(line), "{text}: {error}");
        }
    }

    /// A small compressed file can hold a line larger than memory.
    #[test]
    fn a_line_without_end_is_refused_at_64_kib() {
        let mut zeros = std::io::BufReader::new(std::io::repeat(0).take(1 << 40));
        let error = parse(&mut zeros).unwrap_err();
        assert_eq!(error, "line 1: it has 64 KiB or more");
        let long = "a 1 512 0".to_owned() + &" ".repeat(1 << 16);
        assert!(parse(long.as_bytes()).unwrap_err().contains("64 KiB"));
        assert!(parse(format!("{}\n", &long[..60_000]).as_bytes()).is_ok());
    }
}
