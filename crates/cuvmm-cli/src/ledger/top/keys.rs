//! Keys of the live picture.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::state::{Change, Request, State};
use cuvmm_command::terminal::safe;

const PAGE: isize = 10;

/// The work that a key leaves to the loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Draw,
    /// Draws every cell anew.
    Redraw,
    Send(Request),
    Quit,
}

pub(super) fn press(state: &mut State, key: KeyEvent) -> Action {
    if key.kind == KeyEventKind::Release {
        return Action::Draw;
    }
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return match key.code {
            KeyCode::Char('c') => Action::Quit,
            KeyCode::Char('l') => Action::Redraw,
            _ => Action::Draw,
        };
    }
    if let Some(request) = state.asking.take() {
        return match key.code {
            KeyCode::Char('y' | 'Y') => send(state, request),
            _ => {
                state.said = "nothing was changed".to_owned();
                Action::Draw
            }
        };
    }
    if state.help {
        // Any key leaves the help.
        state.help = false;
        return Action::Draw;
    }
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => return Action::Quit,
        KeyCode::Char('?' | 'h') => state.help = true,
        KeyCode::Up | KeyCode::Char('k') => state.select(-1),
        KeyCode::Down | KeyCode::Char('j') => state.select(1),
        KeyCode::PageUp => state.select(-PAGE),
        KeyCode::PageDown => state.select(PAGE),
        KeyCode::Home | KeyCode::Char('g') => state.select(isize::MIN),
        KeyCode::End | KeyCode::Char('G') => state.select(isize::MAX),
        KeyCode::Enter | KeyCode::Char(' ') => state.expand(),
        KeyCode::Char('s') => state.sort(false),
        KeyCode::Char('S') => state.sort(true),
        KeyCode::Char('r') => state.turn(),
        KeyCode::Char('t') => return ask(state, Change::Trim),
        KeyCode::Char('z') => return ask(state, Change::Sleep),
        KeyCode::Char('w') => return ask(state, Change::Wake),
        _ => {}
    }
    Action::Draw
}

/// Requests a change of the selection. Sleep needs a confirmation first.
fn ask(state: &mut State, change: Change) -> Action {
    let Some(mut target) = state.selected.clone() else {
        state.said = "no process is selected".to_owned();
        return Action::Draw;
    };
    if change == Change::Trim {
        // Memory is trimmed by process.
        target.tenant = None;
    }
    let request = Request { change, target };
    if change == Change::Sleep {
        state.asking = Some(request);
        return Action::Draw;
    }
    send(state, request)
}

fn send(state: &mut State, request: Request) -> Action {
    let asked = match request.change {
        Change::Trim => "to give back idle memory",
        Change::Sleep => "to sleep",
        Change::Wake => "to wake",
    };
    state.said = format!("asked {} {asked} ...", named(&request));
    Action::Send(request)
}

pub(super) fn named(request: &Request) -> String {
    let target = &request.target;
    match &target.tenant {
        Some((_, tenant)) => format!("{}/{}", safe(&target.name), safe(tenant)),
        None => safe(&target.name).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::columns::Column;
    use super::super::sample::{MIB, ledger, process, with_tenant};
    use super::super::state::Look;
    use super::*;

    fn state() -> State {
        let chat = with_tenant(process(0, "chat"), "model\n", MIB);
        let mut state = State::default();
        state.look(Look {
            at: Instant::now(),
            ledgers: Some(vec![ledger("/x", vec![chat, process(1, "code")])]),
            wrong: String::new(),
        });
        state
    }

    fn key(state: &mut State, code: KeyCode) -> Action {
        press(state, KeyEvent::from(code))
    }

    fn char(state: &mut State, key: char) -> Action {
        self::key(state, KeyCode::Char(key))
    }

    fn selected(state: &State) -> (&str, bool) {
        let selected = state.selected.as_ref().unwrap();
        (&selected.name, selected.tenant.is_some())
    }

    #[test]
    fn keys_quit() {
        let control = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        for (help, asking) in [(false, false), (true, false), (false, true)] {
            let mut state = state();
            if help {
                char(&mut state, '?');
            }
            if asking {
                char(&mut state, 'z');
            }
            assert_eq!(press(&mut state, control), Action::Quit);
            let plain = !help && !asking;
            let escaped = key(&mut state, KeyCode::Esc) == Action::Quit;
            assert_eq!(escaped, plain, "it leaves the help or the question");
            assert!(!state.help && state.asking.is_none());
            assert_eq!(char(&mut state, 'q'), Action::Quit);
        }
    }

    #[test]
    fn keys_select_and_expand() {
        let mut state = state();
        assert_eq!(selected(&state), ("chat", false));
        assert_eq!(key(&mut state, KeyCode::Down), Action::Draw);
        assert_eq!(selected(&state), ("code", false));
        char(&mut state, 'k');
        assert_eq!(selected(&state), ("chat", false));
        key(&mut state, KeyCode::Enter);
        char(&mut state, 'j');
        assert_eq!(selected(&state), ("chat", true));
        key(&mut state, KeyCode::End);
        assert_eq!(selected(&state), ("code", false));
        key(&mut state, KeyCode::Home);
        char(&mut state, ' ');
        key(&mut state, KeyCode::PageDown);
        assert_eq!(selected(&state), ("code", false));
        key(&mut state, KeyCode::Up);
        assert_eq!(selected(&state), ("chat", false));
    }

    #[test]
    fn keys_sort() {
        let mut state = state();
        char(&mut state, 's');
        assert_eq!(state.sort, Column::InUse);
        char(&mut state, 'S');
        assert_eq!(state.sort, Column::Charged);
        char(&mut state, 'r');
        assert!(state.reverse);
    }

    #[test]
    fn only_sleep_asks_first() {
        let mut state = state();
        char(&mut state, ' ');
        char(&mut state, 'j');
        let of = |action| match action {
            Action::Send(request) => (request.change, named(&request)),
            other => panic!("{other:?}"),
        };
        assert_eq!(of(char(&mut state, 't')), (Change::Trim, "chat".to_owned()));
        assert_eq!(state.said, "asked chat to give back idle memory ...");
        assert_eq!(
            of(char(&mut state, 'w')),
            (Change::Wake, "chat/model\\n".to_owned())
        );
        assert_eq!(char(&mut state, 'z'), Action::Draw);
        assert!(state.asking.is_some());
        assert_eq!(char(&mut state, 'n'), Action::Draw);
        assert_eq!(state.said, "nothing was changed");
        char(&mut state, 'z');
        assert_eq!(
            of(char(&mut state, 'y')),
            (Change::Sleep, "chat/model\\n".to_owned())
        );
        assert_eq!(state.said, "asked chat/model\\n to sleep ...");
    }

    #[test]
    fn without_a_process_nothing_is_asked() {
        let mut state = State::default();
        for key in ['t', 'z', 'w', 'j', 'k', ' ', 's', 'r', 'x'] {
            assert_eq!(char(&mut state, key), Action::Draw);
        }
        assert_eq!(state.said, "no process is selected");
        assert_eq!(state.asking, None);
    }
}
