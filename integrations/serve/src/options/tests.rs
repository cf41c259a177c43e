//! Options: their meaning, and which are refused.

use super::*;

fn options(line: &[&str]) -> Options {
    Options::parse_from([&["serve"], line].concat())
}

#[test]
fn the_limit_is_shares_of_weights_and_short_sequences() {
    let options = options(&["--share", "3"]);
    let specs = options.specs().unwrap();
    let granule = 2 << 20;
    let weights = specs[0].weights().unwrap().next_multiple_of(granule);
    // 16 granules for each sequence: keys and values of 8 layers.
    let expected = 2 * (weights + 3 * 16 * granule);
    assert_eq!(options.limit(&specs, granule).unwrap(), expected);
    // Two more granules, of which the second is not full.
    let system = self::options(&["--share", "3", "--system-prompt", "3072"]);
    let specs = system.specs().unwrap();
    let more = expected + 2 * 2 * 16 * granule;
    assert_eq!(system.limit(&specs, granule).unwrap(), more);
    let fixed = self::options(&["--limit", "300"]);
    assert_eq!(fixed.limit(&specs, granule).unwrap(), 300 << 20);
}

#[test]
fn system_prompts_are_a_models_own_and_leave_room_behind() {
    let line = ["--system-prompt", "8000", "--lengths", "10"];
    let shared = options(&line);
    let specs = shared.specs().unwrap();
    let [one, other] = [&specs[0].system, &specs[1].system];
    assert_eq!((one.tokens.len(), other.tokens.len()), (8000, 8000));
    assert!(one.is_shared() && one.tokens != other.tokens);
    let apart = shared.without_prefix_cache().specs().unwrap();
    assert!(!apart[0].system.is_shared());
    assert_eq!(apart[0].system.tokens, one.tokens);
    assert!(!options(&[]).specs().unwrap()[0].system.is_shared());

    let config = shared.config().unwrap();
    for request in shared.requests(&config, None).unwrap() {
        assert!(request.prompt + request.answer <= 192, "{request:?}");
    }
    let full = options(&["--system-prompt", "8192"]);
    assert!(full.requests(&config, None).is_err());
}

/// Each case is an error that names the problem, not a panic or a server that never ends.
#[test]
fn what_makes_no_sense_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let config = |name: &str, more: &str| {
        let all = r#""hidden_size": 64, "intermediate_size": 96, "vocab_size": 500,
            "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 2048"#;
        // Later duplicates of a key would be an error.
        let key = more.split(':').next().unwrap();
        let all: Vec<&str> = all.split(',').filter(|line| !line.contains(key)).collect();
        file(name, &format!("{{{}, {more}}}", all.join(",")))
    };
    let trace = file(
        "trace.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n\
         2023-11-16 18:15:46,18446744073709551615,18446744073709551615\n\
         2023-11-16 18:16:46,1,18446744073709551615\n",
    );
    let check = |line: &[&str]| {
        let options = Options::try_parse_from([&["serve"], line].concat())?;
        options.check()
    };
    assert!(check(&[]).is_ok() && check(&["--trace", &trace]).is_ok());
    assert!(check(&["--config", &config("good", r#""rope_theta": 5e5"#)]).is_ok());
    for (line, says) in [
        (&["--models", "0"][..], "--models"),
        (&["--slots", "0"], "--slots"),
        (&["--batch", "0"], "--batch"),
        (&["--rounds", "0"], "--rounds"),
        (&["--prompt", "a", "--answer", "0"], "--answer"),
        (&["--prompt", "a", "--compare"], "--compare"),
        (&["--mode", "static", "--compare"], "--compare"),
        (
            &[
                "--compare",
                "--config",
                &config("f", r#""max_position_embeddings": 512"#),
            ],
            "576 tokens",
        ),
        (&["--limit", "99999999999999"], "--limit"),
        (&["--share", "99999999999999"], "--share"),
        (&["--windows", "0"], "--windows"),
        (&["--burst", "0"], "--burst"),
        (&["--window", "0"], "longer than zero"),
        (&["--window=-1"], "--window -1"),
        (&["--window", "1e19"], "never end"),
        (&["--speed", "0"], "greater than zero"),
        (&["--lengths", "nan"], "greater than zero"),
        (&["--system-prompt", "8191"], "8191 tokens of system prompt"),
        (&["--system-prompt", "99999999999"], "99999999999 tokens"),
        (&["--config", "/no/config.json"], "/no/config.json"),
        (&["--config", &file("text", "none")], "text"),
        (&["--trace", "/no/trace.csv"], "/no/trace.csv"),
        (&["--weights", "/no/safetensors"], "/no/safetensors"),
        (
            &["--config", &config("a", r#""num_hidden_layers": 0"#)],
            "num_hidden_layers",
        ),
        (
            &["--config", &config("b", r#""num_attention_heads": 0"#)],
            "num_attention_heads",
        ),
        (
            &["--config", &config("c", r#""num_key_value_heads": 3"#)],
            "num_key_value_heads",
        ),
        (
            &["--config", &config("d", r#""hidden_size": 72"#)],
            "hidden_size",
        ),
        (
            &["--config", &config("e", r#""max_position_embeddings": 1"#)],
            "max_position_embeddings",
        ),
    ] {
        let refused = check(line).err();
        let refused = format!("{:#}", refused.unwrap_or_else(|| panic!("{line:?}")));
        assert!(refused.contains(says), "{line:?}: {refused}");
    }
    // Everything before the end of the last turn is served, however slow.
    let slow = options(&["--trace", &trace, "--speed", "1e-300"]);
    let requests = slow.requests(&slow.config().unwrap(), None).unwrap();
    assert_eq!(requests.len(), 2);
    let full = slow.requests(&slow.config().unwrap(), Some(1000.)).unwrap();
    assert_eq!(full, requests);
}

#[test]
fn a_load_is_turned_into_speed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.csv");
    // Ten tokens per second.
    let lines: Vec<String> = (0..=50)
        .map(|second| {
            format!(
                "2023-11-16 18:15:{second:02}.5,7,{}",
                if second == 0 { 0 } else { 10 }
            )
        })
        .collect();
    let text = format!(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n{}",
        lines.join("\n")
    );
    std::fs::write(&path, text).unwrap();
    let path = path.display().to_string();
    let line = [
        "--trace",
        &path,
        "--load",
        "0.5",
        "--window",
        "1",
        "--windows",
        "4",
    ];
    let options = options(&line);
    let config = options.config().unwrap();
    // Two models in turn, at twice their rate each: 40 tokens per second would be the full load.
    let requests = options.requests(&config, Some(40.)).unwrap();
    let at: Vec<(usize, u128)> = requests
        .iter()
        .map(|request| (request.model, request.arrival.as_millis()))
        .collect();
    let expected = [
        (0, 0),
        (0, 500),
        (1, 1000),
        (1, 1500),
        (0, 2000),
        (0, 2500),
        (1, 3000),
        (1, 3500),
    ];
    assert_eq!(at, expected);
    let slow = options.requests(&config, None).unwrap();
    assert_eq!(slow.len(), 4);
}
