// A program in a pseudo terminal, and the text on its screen. This is also included in a unit test,
// where a file has no documentation of its own.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Termios, Winsize, tcgetattr, tcsetwinsize};

/// How long a text may take to appear. It is never waited for in full but by a test that fails.
const PATIENCE: Duration = Duration::from_secs(90);

/// A program in a terminal of its own. It is killed when this is dropped.
pub(crate) struct Pty {
    /// The side of the terminal's owner.
    owner: File,
    /// The side of the program. It stays open so that its modes can be read after the program.
    line: OwnedFd,
    child: Child,
    output: Receiver<Vec<u8>>,
    screen: vt100::Parser,
    before: Termios,
}

impl Pty {
    /// Starts a program in a terminal of this size.
    pub(crate) fn start(program: &str, arguments: &[&str], columns: u16, rows: u16) -> Self {
        let owner = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC);
        let owner = owner.unwrap();
        grantpt(&owner).unwrap();
        unlockpt(&owner).unwrap();
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let line = ioctl_tiocgptpeer(&owner, flags).unwrap();
        let owner = File::from(owner);
        resize(&owner, columns, rows);
        let before = tcgetattr(&line).unwrap();
        // The terminal controls the program, so that the program finds its size and gets its
        // signals.
        let child = Command::new("setsid")
            .arg("--ctty")
            .arg(program)
            .args(arguments)
            .env("TERM", "xterm-256color")
            .stdin(line.try_clone().unwrap())
            .stdout(line.try_clone().unwrap())
            .stderr(line.try_clone().unwrap())
            .spawn()
            .unwrap();
        let (sender, output) = channel();
        let mut reader = owner.try_clone().unwrap();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = reader.read(&mut bytes) {
                if sender.send(bytes[..read].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self {
            owner,
            line,
            child,
            output,
            screen: vt100::Parser::new(rows, columns, 0),
            before,
        }
    }

    /// Returns the screen as it was shown last.
    pub(crate) fn screen(&self) -> &vt100::Screen {
        self.screen.screen()
    }

    /// Presses keys.
    pub(crate) fn press(&mut self, keys: &str) {
        self.owner.write_all(keys.as_bytes()).unwrap();
    }

    /// Changes the size, which signals the program.
    pub(crate) fn resize(&mut self, columns: u16, rows: u16) {
        self.screen.screen_mut().set_size(rows, columns);
        resize(&self.owner, columns, rows);
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits until the screen satisfies a condition.
    #[track_caller]
    pub(crate) fn until(&mut self, what: &str, is: impl Fn(&vt100::Screen) -> bool) {
        let until = Instant::now() + PATIENCE;
        while !is(self.screen.screen()) {
            let left = until.saturating_duration_since(Instant::now());
            match self.output.recv_timeout(left) {
                Ok(bytes) => self.screen.process(&bytes),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    panic!("{what} did not come:\n{}", self.screen.screen().contents())
                }
            }
        }
    }

    /// Waits until all texts are on the screen.
    #[track_caller]
    pub(crate) fn until_shown(&mut self, texts: &[&str]) {
        self.until(&format!("{texts:?}"), |screen| {
            let shown = screen.contents();
            texts.iter().all(|text| shown.contains(text))
        });
    }

    /// Waits for the end of the program. Checks that the terminal is as it was, and returns what is
    /// on its screen.
    #[track_caller]
    pub(crate) fn ended(mut self) -> (ExitStatus, String) {
        let until = Instant::now() + PATIENCE;
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None if Instant::now() > until => panic!("the program did not end"),
                None => thread::sleep(Duration::from_millis(5)),
            }
        };
        // This is behind everything that the program wrote.
        File::from(self.line.try_clone().unwrap())
            .write_all(b"END OF PROGRAM")
            .unwrap();
        self.until_shown(&["END OF PROGRAM"]);
        let screen = self.screen.screen();
        assert!(!screen.alternate_screen(), "the alternate screen is left");
        assert!(!screen.hide_cursor(), "the cursor is shown");
        let after = tcgetattr(&self.line).unwrap();
        let modes = |it: &Termios| {
            let (input, output) = (it.input_modes, it.output_modes);
            (input, output, it.control_modes, it.local_modes)
        };
        assert_eq!(modes(&after), modes(&self.before), "the modes are restored");
        let shown = screen.contents();
        (status, shown.replace("END OF PROGRAM", ""))
    }
}

fn resize(terminal: &File, columns: u16, rows: u16) {
    let size = Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    tcsetwinsize(terminal, size).unwrap();
}

impl Drop for Pty {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
