use std::time::Duration;

use super::*;
use crate::plan::step::{Size, Span};

fn parse(text: &str) -> anyhow::Result<File> {
    File::parse("a plan".to_owned(), text)
}

#[test]
fn every_verb_reads_as_its_step() {
    let text = r#"
[[step]]
reserve = { name = "kv", size = "80 GiB", device = 1 }
[[step]]
create = { name = "p", size = 4096 }
[[step]]
[step.map]
physical = "p"
in = "r"
at = "2MiB"
access = [0, 2]
[[step]]
unmap = { in = "r", at = 0 }
[[step]]
commit = { in = "kv", size = "1 GiB" }
[[step]]
commit = { in = "kv", at = "2 GiB", size = "1.5 KiB" }
[[step]]
grow = { in = "kv", to = "40 GiB", by = "2 MB" }
[[step]]
decommit = { in = "kv", at = 0, size = 7 }
[[step]]
stripe = { name = "s", size = "8GiB", unit = "2MiB", devices = [0, 1], access = [1] }
[[step]]
release = "kv"
[[step]]
wait = "500 ms"
"#;
    let file = parse(text).unwrap();
    let name = |name: &str| name.to_owned();
    let mib = 1 << 20;
    let expected = [
        Step::Reserve {
            name: name("kv"),
            size: Size(80 << 30),
            device: 1,
        },
        Step::Create {
            name: name("p"),
            size: Size(4096),
            device: 0,
        },
        Step::Map {
            physical: name("p"),
            within: name("r"),
            at: Size(2 * mib),
            access: vec![0, 2],
        },
        Step::Unmap {
            within: name("r"),
            at: Size(0),
        },
        Step::Commit {
            within: name("kv"),
            at: None,
            size: Size(1 << 30),
        },
        Step::Commit {
            within: name("kv"),
            at: Some(Size(2 << 30)),
            size: Size(1536),
        },
        Step::Grow {
            within: name("kv"),
            to: Size(40 << 30),
            by: Size(2_000_000),
        },
        Step::Decommit {
            within: name("kv"),
            at: Size(0),
            size: Size(7),
        },
        Step::Stripe {
            name: name("s"),
            size: Size(8 << 30),
            unit: Size(2 * mib),
            devices: vec![0, 1],
            access: vec![1],
        },
        Step::Release(name("kv")),
        Step::Wait(Span {
            time: Duration::from_millis(500),
            written: name("500 ms"),
        }),
    ];
    assert_eq!(file.steps, expected);
    assert_eq!(file.devices(), 3);
    assert_eq!(file.does(1), "reserve 80 GiB as kv");
    assert_eq!(file.does(11), "wait 500 ms");
    // The header of each step, and the first key of the step without a header.
    assert_eq!(&file.lines[..5], [2, 4, 6, 12, 14]);
}

#[test]
fn what_cannot_be_read_is_named_with_its_line() {
    for (text, line, word) in [
        ("step = 3", 1, "sequence"),
        ("", 1, "step"),
        ("[[step]]\nreserve = { name = \"a\" }", 2, "size"),
        (
            "[[step]]\nreserve = { name = \"a\", size = \"many\" }",
            2,
            "512MiB",
        ),
        (
            "[[step]]\nreserve = { name = \"a\", size = \"99999999999EiB\" }",
            2,
            "at most 18446744073709551615",
        ),
        (
            "[[step]]\nreserve = { name = \"a\", size = -1 }",
            2,
            "2 MiB",
        ),
        (
            "[[step]]\n\nreserve = { name = \"a\", size = 1, at = 2 }",
            3,
            "keys in table: at,",
        ),
        ("[[step]]\nmalloc = 3", 2, "malloc"),
        ("[[step]]\nwait = \"soon\"", 2, "500 ms"),
        ("[[step]]\nwait = \"-1 s\"", 2, "500 ms"),
        ("steps = []\n", 1, "steps"),
        ("[[step]\n", 1, ""),
    ] {
        let error = parse(text).unwrap_err().to_string();
        let start = format!("a plan, line {line}: ");
        assert!(
            error.starts_with(&start) && error.contains(word),
            "{text:?}: {error}"
        );
    }
}
