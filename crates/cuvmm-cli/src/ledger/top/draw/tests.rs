//! Pictures of some states.

use std::time::{Duration, Instant};

use cuvmm::ledger::ExportStats;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent};
use ratatui::style::Modifier;

use super::*;
use crate::ledger::top::keys::press;
use crate::ledger::top::sample::{MIB, ledger, process, waiting, with_tenant};
use crate::ledger::top::state::{Look, State};

fn state(ledgers: Vec<Shown>) -> State {
    let mut state = State::default();
    look(&mut state, Instant::now(), ledgers);
    state
}

fn look(state: &mut State, at: Instant, ledgers: Vec<Shown>) {
    let (ledgers, wrong) = (Some(ledgers), String::new());
    state.look(Look { at, ledgers, wrong });
}

fn keys(state: &mut State, keys: &str) {
    for key in keys.chars() {
        press(state, KeyEvent::from(KeyCode::Char(key)));
    }
}

fn terminal(state: &State, width: u16, height: u16) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal
        .draw(|frame| draw(state, frame.area(), frame.buffer_mut()))
        .unwrap();
    terminal
}

/// Returns the lines, without trailing spaces.
fn lines(state: &State, width: u16, height: u16) -> Vec<String> {
    let terminal = terminal(state, width, height);
    let buffer = terminal.backend().buffer();
    let cells = buffer.content.chunks(width.into());
    let line = |cells: &[ratatui::buffer::Cell]| {
        let text: String = cells.iter().map(|cell| cell.symbol()).collect();
        text.trim_end().to_owned()
    };
    cells.map(line).collect()
}

fn two() -> Vec<Shown> {
    let mut chat = with_tenant(process(0, "chat"), "cache", 300 * MIB);
    chat.stats.charged = 512 * MIB;
    chat.stats.idle = 128 * MIB;
    chat.stats.guarantee = 256 * MIB;
    let mut code = process(1, "code");
    code.stats.charged = 512 * MIB;
    waiting(&mut code, 64 * MIB, &[], &[(0, 256 * MIB, 128 * MIB)]);
    code.stats.priority = -7;
    code.stats.stalled = Duration::from_millis(2_500);
    code.stats.stalled_average.avg10 = 12.34;
    code.stats.stalled_full_average.avg10 = 4.0;
    code.report = None;
    code.no_report = Some("it is\nbusy".to_owned());
    let mut ledger = ledger("/tmp/gpu/abc.cuvmm-ledger", vec![chat, code]);
    (ledger.foreign, ledger.usable) = (80 * MIB, 1000 * MIB);
    ledger.stalled_average.avg60 = 2.06;
    let mut export = ExportStats::default();
    (export.owner, export.bytes, export.holders) = (0, 64 * MIB, vec![1]);
    ledger.exports = vec![export];
    vec![ledger]
}

#[test]
fn a_normal_screen_has_all_columns() {
    let mut state = state(two());
    let expected = [
        "2 processes in 1 ledger, sorted by charged",
        "/tmp/gpu/abc.cuvmm-ledger",
        "[###################################=====] 1.00 of 1.00 GiB charged (100%)",
        "stalled: some 0.0 2.1 0.0 %, full 0.0 0.0 0.0 % (10, 60, 300 s)",
        "foreign memory: 80 MiB, which leaves 1000 MiB of the limit",
        "process            pid state  vcharged in use cached   idle  guar.  limit stalled some% full% growth",
        "+ chat            1000 running    0.50   0.29      0   0.12   0.25   1.00       0     0     0",
        "+ code            1001 running    0.50      ?      ?      0      0   1.00     2.5  12.3   4.0",
        "    waits 1.3 s for 64 MiB: idle at chat (128 MiB)",
        "chat lends 64 MiB in 1 block to code",
    ];
    assert_eq!(lines(&state, 100, 30)[..10], expected);
    keys(&mut state, " jr");
    let shown = lines(&state, 100, 30);
    assert_eq!(
        shown[0],
        "2 processes in 1 ledger, sorted by charged, reversed"
    );
    assert!(shown[5].contains("^charged"), "{shown:#?}");
    let own =
        "    stalled 0 s, 0 s in full; some 0.0 0.0 0.0 %, full 0.0 0.0 0.0 % (10, 60, 300 s)";
    assert!(shown.iter().any(|it| it == own), "{shown:#?}");
    let tenants = [
        "    tenant                         in use cached asleep  limit  guar. pending free precommitted prio",
        "    /cache                           0.29      0      0   1.00      0            0            0    0",
    ];
    assert!(shown.windows(2).any(|it| it == tenants), "{shown:#?}");
    assert_eq!(shown[29], KEYS);
}

#[test]
fn a_narrow_screen_has_fewer_columns() {
    let mut state = state(two());
    let expected = [
        "2 processes in 1 ledger, sorted by charged",
        "/tmp/gpu/abc.cuvmm-ledger",
        "[#######################===] 1.00 of 1.00 GiB charged (100%)",
    ];
    let shown = lines(&state, 60, 12);
    assert_eq!(shown[..3], expected);
    assert!(shown[5].contains("vcharged in use   idle"), "{shown:#?}");
    assert!(shown.iter().all(|it| it.chars().count() <= 60));
    assert!(shown[10].is_empty(), "the status");
    assert_eq!(
        shown[11],
        "q quit  ? help  j/k move  Enter open  s sort  t trim"
    );
    keys(&mut state, "z");
    assert_eq!(lines(&state, 60, 10)[8], "put chat to sleep? y or n");
    keys(&mut state, "n?");
    assert!(lines(&state, 60, 10)[1].starts_with("up, down, k, j"));
    for (width, height) in [(1, 1), (5, 2), (9, 3), (20, 4), (300, 3), (2, 80)] {
        let _ = terminal(&state, width, height);
        keys(&mut state, "? ");
        let _ = terminal(&state, width, height);
    }
}

#[test]
fn the_help_folds_at_a_narrow_terminal() {
    let mut state = state(two());
    keys(&mut state, "?");
    let shown = lines(&state, 40, 24);
    assert_eq!(
        shown[1..3],
        [
            "up, down, k, j   select a process or",
            "  tenant; also PageUp, PageDown, Home,"
        ]
    );
    assert!(
        shown[23].starts_with("any key leaves the help; a taller"),
        "{shown:#?}"
    );
    let whole = lines(&state, 40, 60);
    assert!(
        whole.contains(&"  and = is idle memory.".to_owned()),
        "{whole:#?}"
    );
    assert_eq!(whole[59], "any key leaves the help");
    assert_eq!(lines(&state, 80, 24)[23], "any key leaves the help");
}

#[test]
fn the_keys_are_whole_words_at_every_width() {
    let all = "q quit  ? help  j/k move  Enter open  s sort  t trim  z sleep  w wake  r reverse";
    for (width, expected) in [
        (100, KEYS),
        (80, all),
        (79, &all[..69]),
        (17, "q quit  ? help"),
        (5, ""),
    ] {
        let shown = lines(&State::default(), width, 10);
        assert_eq!(shown[9], expected, "{width} columns");
    }
}

#[test]
fn without_a_ledger_it_says_so() {
    let shown = lines(&State::default(), 60, 10);
    assert_eq!(shown[1], "looking ...");
    let mut empty = state(Vec::new());
    empty.folder = "/run/cuvmm".to_owned();
    let shown = lines(&empty, 60, 10);
    assert_eq!(shown[0], "0 processes in 0 ledgers, sorted by charged");
    assert_eq!(shown[1], "there is no ledger in /run/cuvmm");
    let mut gone = ledger("/x", Vec::new());
    gone.in_place = false;
    let shown = lines(&state(vec![gone]), 60, 10);
    assert_eq!(shown[4], "the file was removed or replaced");
    assert_eq!(shown[5], "no process uses it");
}

#[test]
fn the_selected_process_is_always_in_sight() {
    let one = process(0, "p0");
    let many = (0..50).map(|slot| {
        let mut process = one.clone();
        process.stats.slot = slot;
        process.stats.name = format!("p{slot}");
        process.stats.charged = (100 - slot as u64) * MIB;
        process
    });
    let mut state = state(vec![ledger("/x", many.collect())]);
    for slot in 0..50 {
        let terminal = terminal(&state, 60, 10);
        let buffer = terminal.backend().buffer();
        let selected: Vec<u16> = (0..10)
            .filter(|y| buffer[(2, *y)].modifier.contains(Modifier::REVERSED))
            .collect();
        assert_eq!(selected.len(), 1, "process {slot}");
        assert!((1..8).contains(&selected[0]));
        let line = &lines(&state, 60, 10)[usize::from(selected[0])];
        assert!(line.starts_with(&format!("+ p{slot} ")), "{line}");
        keys(&mut state, "j");
    }
    assert!(lines(&state, 60, 10)[7].starts_with("+ p49 "));
}

#[test]
fn names_and_reasons_do_not_control_the_terminal() {
    let mut process = with_tenant(process(0, "a\u{1b}[2J\u{202e}b"), "t\nu\u{9b}", MIB);
    process.stats.waits_for = Some(1);
    let mut state = state(vec![ledger("/x\u{7}y", vec![process])]);
    keys(&mut state, " z");
    let shown = lines(&state, 200, 30).join("\n");
    for text in [
        "/x\\u{7}y",
        "- a\\u{1b}[2J\\u{202e}b",
        "/t\\nu\\u{9b}",
        "put a\\u{1b}[2J\\u{202e}b to sleep",
    ] {
        assert!(shown.contains(text), "{text}\n{shown}");
    }
    state.asking = None;
    state.trouble = Some("no\u{1b}c".to_owned());
    assert!(lines(&state, 200, 30)[28].contains("no\\u{1b}c"));
    let mut two = two();
    two[0].processes.remove(0);
    look(&mut state, Instant::now(), two);
    keys(&mut state, " ");
    let shown = lines(&state, 200, 30).join("\n");
    assert!(shown.contains("no tenants: it is\\nbusy"), "{shown}");
}

#[test]
fn growth_is_shown_after_two_looks() {
    let now = Instant::now();
    let mut state = State::default();
    look(&mut state, now, two());
    let mut later = two();
    later[0].processes[0].stats.charged -= 256 * MIB;
    later[0].processes[1].stats.charged += 256 * MIB;
    look(&mut state, now + Duration::from_secs(2), later);
    let shown = lines(&state, 100, 30);
    assert!(shown[6].starts_with("+ code"), "{shown:#?}");
    assert!(shown[6].ends_with("  2.5  12.3   4.0  +0.12"), "{shown:#?}");
    assert!(shown[8].ends_with("    0     0     0  -0.12"), "{shown:#?}");
}

#[test]
fn figures_that_are_too_long_are_marked() {
    let mut state = state(two());
    let shown = state.ledgers.as_mut().unwrap();
    shown[0].processes[0].stats.priority = i32::MIN;
    assert!(lines(&state, 110, 30)[6].contains(" -21~ "));
}
