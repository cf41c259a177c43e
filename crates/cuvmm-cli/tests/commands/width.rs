//! No line of default output is wider than 100 columns; `--verbose` has no such bound.

#![allow(clippy::unwrap_used)]

use assert_cmd::Command;

use super::support::pty::Pty;

fn text(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    let assert = command.args(arguments).assert().success();
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

fn widest(text: &str) -> usize {
    let widths = text.lines().map(|line| line.chars().count());
    widths.max().unwrap_or_default()
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn default_output_fits() {
    let plan = concat!(env!("CARGO_MANIFEST_DIR"), "/plans/elastic-kv.toml");
    let two = concat!(env!("CARGO_MANIFEST_DIR"), "/plans/two-gpus.toml");
    let table = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../cuvmm-model/costs/nvidia-h200.costs"
    );
    for arguments in [
        &["info"][..],
        &["info", "--driver", "host", "--devices", "8"],
        &["replay", "--driver", "model"],
        &["replay", "--driver", "host", "--memory", "1GiB", "--expect"],
        &["plan", plan],
        &["plan", two],
        &["plan", plan, "--costs", table],
        &["share", "list"],
        &["--help"],
        &["info", "--help"],
        &["replay", "--help"],
        &["plan", "--help"],
        &["share", "--help"],
        &["share", "publish", "--help"],
        &["share", "attach", "--help"],
        &["share", "keep", "--help"],
        &["share", "drop", "--help"],
        &["fake", "--help"],
        &["top", "--help"],
        &["ctl", "--help"],
        &["metrics", "--help"],
        &["record", "--help"],
        &["picture", "--help"],
    ] {
        let text = text(arguments);
        assert!(
            widest(&text) <= 100,
            "{arguments:?}: {} columns\n{text}",
            widest(&text)
        );
    }
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn details_are_in_verbose_output() {
    let plan = concat!(env!("CARGO_MANIFEST_DIR"), "/plans/elastic-kv.toml");
    let narrow = text(&["plan", plan]);
    let wide = text(&["plan", plan, "--verbose"]);
    assert!(wide.contains("mappings |") && !narrow.contains("mappings |"));
    let replay = text(&["replay", "--driver", "model", "-v"]);
    assert!(replay.contains("TTFT p95"), "{replay}");
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn on_a_narrow_terminal_tables_have_fewer_columns() {
    for arguments in [
        &["replay", "--driver", "model"][..],
        &["heap", "--churn", "small"],
        &["info", "--driver", "host"],
    ] {
        // A line that is too long would be continued in the next line, at its first column.
        let screen = Pty::start(env!("CARGO_BIN_EXE_cuvmm"), arguments, 60, 120);
        let (status, shown) = screen.ended();
        assert!(status.success(), "{arguments:?}: {shown}");
        for row in shown.lines().filter(|line| line.starts_with('|')) {
            assert!(
                row.trim_end().ends_with('|'),
                "{arguments:?}: {row}\n{shown}"
            );
        }
    }
}
