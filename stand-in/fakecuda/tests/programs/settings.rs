//! Settings, and the functions that only the stand-in has, from programs in C.

use crate::programs::{Programs, said};

#[test]
fn settings_come_from_variables_and_from_a_file() {
    let programs = Programs::new();
    let show = programs.compile("settings");
    let shown = |settings: &[(&str, &str)]| {
        let output = programs.run(&show, &[], settings);
        assert!(output.status.success(), "{}", said(&output));
        (
            String::from_utf8(output.stdout.clone()).unwrap(),
            said(&output),
        )
    };
    let usual = "init 0 version 13000 devices 1 name fakecuda bytes 67108864 alloc 0 0 0 0 pool 0";
    assert_eq!(shown(&[]), (usual.to_owned(), String::new()));
    let (gpu, _) = shown(&[("FAKECUDA_GPU", "h200"), ("FAKECUDA_CAPACITY", "80GiB")]);
    let wanted = "devices 1 name NVIDIA H200 bytes 85899345920 ";
    assert!(gpu.contains(wanted), "{gpu}");
    let (gpu, _) = shown(&[("FAKECUDA_GPU", "h100")]);
    assert!(gpu.contains("name NVIDIA H100 80GB HBM3 "), "{gpu}");
    // A driver of CUDA 11.0 has no memory pools.
    let (old, _) = shown(&[("FAKECUDA_VERSION", "11.0")]);
    assert!(
        old.contains("version 11000") && old.ends_with("pool 801"),
        "{old}"
    );
    let (faults, _) = shown(&[("FAKECUDA_FAIL", "cuMemAlloc:2,cuMemAlloc:4-:UNKNOWN")]);
    assert!(faults.ends_with("alloc 0 2 0 999 pool 0"), "{faults}");
    let (first, _) = shown(&[("FAKECUDA_FAIL", "cuInit:1:NO_DEVICE")]);
    assert_eq!(first, "init 100 version 13000");
    // The calls take the time that they cost, and answer as without.
    let (slow, _) = shown(&[("FAKECUDA_LATENCY", "h200")]);
    assert_eq!(slow, usual);
    let path = programs.path("settings.toml");
    std::fs::write(
        &path,
        "devices = 3\nname = \"mine\"\nfail = [\"cuMemAlloc:1\"]\n",
    )
    .unwrap();
    let (file, _) = shown(&[("FAKECUDA_CONFIG", path.to_str().unwrap())]);
    assert!(
        file.contains("devices 3 name mine") && file.contains("alloc 2 0 0 0"),
        "{file}"
    );
}

#[test]
fn a_setting_that_is_wrong_is_said_and_cuinit_fails() {
    let programs = Programs::new();
    let show = programs.compile("settings");
    for (name, value, message) in [
        (
            "FAKECUDA_DEVICES",
            "x",
            "FAKECUDA_DEVICES=x: it must be a number from 0 to 64",
        ),
        (
            "FAKECUDA_DEVICE",
            "1",
            "FAKECUDA_DEVICE=1: there is no such setting",
        ),
        (
            "FAKECUDA_REPORT",
            "/no/such/folder/file",
            "the report cannot be written there",
        ),
        (
            "FAKECUDA_CONFIG",
            "/no/such/file.toml",
            "/no/such/file.toml: No such file",
        ),
        (
            "FAKECUDA_FAIL",
            "cuMemAllocate:1",
            "cuMemAllocate is no function of this library",
        ),
    ] {
        let output = programs.run(&show, &[], &[(name, value)]);
        let (text, error) = (String::from_utf8_lossy(&output.stdout), said(&output));
        assert_eq!(text, "init 802 version 13000", "{name}");
        assert!(error.contains(message), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

#[test]
fn a_check_of_settings_finds_no_device_and_leaves_no_report() {
    let programs = Programs::new();
    let show = programs.compile("settings");
    let report = programs.path("report.%p");
    let report = ("FAKECUDA_REPORT", report.to_str().unwrap());
    let check = ("FAKECUDA_CHECK", "1");
    let files = || std::fs::read_dir(programs.path("")).unwrap().count();
    let before = files();
    let output = programs.run(&show, &[], &[report, check]);
    let shown = String::from_utf8_lossy(&output.stdout);
    assert_eq!((&*shown, &*said(&output)), ("init 100 version 13000", ""));
    assert_eq!(files(), before);
    let output = programs.run(&show, &[], &[report, check, ("FAKECUDA_GPU", "abacus")]);
    let error = said(&output);
    assert!(error.contains("FAKECUDA_GPU=abacus: it must be"), "{error}");
}

#[test]
fn a_test_in_c_controls_the_stand_in() {
    let programs = Programs::new();
    let control = programs.compile("control");
    let output = programs.run(&control, &[], &[]);
    assert!(output.status.success(), "{}", said(&output));
    let lines: Vec<_> = said(&output).lines().map(str::to_owned).collect();
    assert!(
        lines[0].contains("2 findings; 1 failed by injection"),
        "{lines:?}"
    );
    let json: serde_json::Value = serde_json::from_str(lines.last().unwrap()).unwrap();
    assert_eq!((&json["found"], &json["injected"]), (&0.into(), &1.into()));
}
