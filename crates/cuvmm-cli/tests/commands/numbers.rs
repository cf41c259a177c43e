//! Errors in numbers, sizes and durations say what is expected, with an example, in every option that
//! takes one.

use assert_cmd::Command;

/// Runs the command, which refuses its arguments with one line, and returns that line.
fn refused(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    let assert = command.args(arguments).assert().code(2);
    let said = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert_eq!(said.lines().count(), 1, "{arguments:?}: {said}");
    said
}

#[test]
fn an_option_that_takes_a_number_says_so() {
    for arguments in [
        &["info", "--devices"][..],
        &["demo", "--device"],
        &["replay", "--device"],
        &["replay", "--seed"],
        &["heap", "--seed"],
        &["heap", "--ahead"],
        &["heap", "trace", "--device"],
        &["plan", "plan.toml", "--devices"],
        &["share", "publish", "file", "--device"],
        &["share", "attach", "name", "--dump", "tensor", "--count"],
        &["ctl", "priority", "engine"],
    ] {
        for (value, expected) in [
            ("many", "use a whole number, such as 8"),
            ("1.5", "use a whole number, such as 8"),
            (
                "99999999999999999999",
                "use a smaller whole number, such as 8",
            ),
        ] {
            let said = refused(&[arguments, &[value]].concat());
            let what = format!("invalid value '{value}' for '");
            let right = said.contains(&what) && said.contains(expected);
            assert!(right, "{arguments:?}: {said}");
        }
    }
    for option in ["--gpus", "--exit-code"] {
        let said = refused(&["fake", option, "many", "--", "true"]);
        assert!(said.contains("use a whole number"), "{said}");
    }
    let said = refused(&["heap", "--ahead", "0"]);
    assert!(said.contains("use a whole number of at least 1"), "{said}");
    let said = refused(&["info", "--devices", "65"]);
    assert!(said.contains("65 is not in 1..=64"), "{said}");
}

#[test]
fn an_option_that_takes_a_size_says_so() {
    for arguments in [
        &["replay", "--memory"][..],
        &["replay", "--guarantee"],
        &["replay", "--kv-bytes-per-token"],
        &["heap", "--limit"],
        &["heap", "--memory"],
        &["plan", "plan.toml", "--memory"],
        &["ctl", "guarantee", "engine"],
        &["ctl", "limit", "engine"],
        &["ctl", "trim", "engine", "--keep"],
    ] {
        let said = refused(&[arguments, &["much"]].concat());
        assert!(said.contains("or like 512MiB or 8GiB"), "{said}");
    }
}

#[test]
fn an_option_that_takes_a_duration_says_so() {
    for arguments in [
        &["demo", "--seconds"][..],
        &["top", "--interval"],
        &["ctl", "trim", "engine", "--timeout"],
    ] {
        for (value, expected) in [
            ("soon", "or like 500ms, 5s, 2min or 1h"),
            ("0", "a duration is more than 0"),
            ("1000000h", "a duration is at most 10000h"),
        ] {
            let said = refused(&[arguments, &[value]].concat());
            assert!(said.contains(expected), "{arguments:?}: {said}");
        }
    }
    let said = refused(&["top", "--interval", "5ms"]);
    assert!(said.contains("an interval is at least 100ms"), "{said}");
}

#[test]
fn an_option_that_takes_a_factor_or_a_rate_says_so() {
    let said = refused(&["replay", "--processes", "--speed", "fast"]);
    assert!(
        said.contains("a number from 0.001 to 1000, such as 5"),
        "{said}"
    );
    for option in ["--prefill", "--decode"] {
        let said = refused(&["replay", option, "fast"]);
        assert!(said.contains("from 1 to 1000000, such as 40"), "{said}");
    }
}
