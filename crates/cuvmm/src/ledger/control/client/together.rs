//! One request to several processes at one time.
//!
//! No socket blocks, so a stopped or slow process delays no other.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::{Control, address, line_of, reply_of};
use crate::error::ControlError;
use crate::ledger::control::timed::{Until, connect_now};
use crate::ledger::control::{LONGEST_REPLY, Reply, Request};

/// Bytes of one read.
const PART: usize = 16 << 10;

type Answer = Result<Reply, ControlError>;

enum Course {
    Reading(UnixStream, Vec<u8>),
    Done(Answer),
}

/// Asks all processes the same, and waits for the answers until the time is over.
pub(super) fn ask(processes: &[Control], request: &Request, patience: Duration) -> Vec<Answer> {
    let until = Until::after(patience);
    let begin = |process: &Control| match begin(process, request, patience) {
        Ok(stream) => Course::Reading(stream, Vec::new()),
        Err(error) => Course::Done(Err(error)),
    };
    let mut courses: Vec<Course> = processes.iter().map(begin).collect();
    while let Ok(readable) = wait(&courses, until) {
        let each = processes.iter().zip(&mut courses);
        for ((process, course), _) in each.zip(readable).filter(|&(_, readable)| readable) {
            if let Course::Reading(stream, line) = course {
                let outcome = read(stream, line).map_err(|error| process.failed(error, patience));
                if let Some(answer) = outcome.transpose() {
                    *course = Course::Done(answer.and_then(|()| reply_of(line)));
                }
            }
        }
    }
    let ended = courses.into_iter().map(|course| match course {
        Course::Done(answer) => answer,
        Course::Reading(..) => Err(ControlError::TimedOut(patience)),
    });
    ended.collect()
}

fn begin(
    process: &Control,
    request: &Request,
    patience: Duration,
) -> Result<UnixStream, ControlError> {
    let failed = |error| process.failed(error, patience);
    let connected = address(&process.path, |path: &Path| connect_now(path));
    let stream = connected.map_err(failed)?;
    process.check(&stream, patience)?;
    let line = line_of(request).map_err(failed)?;
    // The request fits into the socket's buffer. A process that refuses has closed the connection
    // already, and its answer says why.
    match (&stream).write(&line) {
        Ok(sent) if sent == line.len() => Ok(stream),
        Ok(_) => Err(failed(io::ErrorKind::WriteZero.into())),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(stream),
        Err(error) => Err(failed(error)),
    }
}

/// Waits until some request can be read, and returns which can. Fails when no answer is awaited, or
/// the time is over.
fn wait(courses: &[Course], until: Until) -> io::Result<Vec<bool>> {
    let mut polled = Vec::new();
    for course in courses {
        if let Course::Reading(stream, _) = course {
            polled.push(PollFd::new(stream, PollFlags::IN));
        }
    }
    if polled.is_empty() {
        return Err(io::ErrorKind::NotFound.into());
    }
    loop {
        let left = Timespec::try_from(until.left()?).map_err(io::Error::other)?;
        match poll(&mut polled, Some(&left)) {
            Ok(_) => break,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    let mut events = polled.iter().map(|it| !it.revents().is_empty());
    let of = |course: &Course| match course {
        Course::Reading(..) => events.next().unwrap_or_default(),
        Course::Done(_) => false,
    };
    Ok(courses.iter().map(of).collect())
}

/// Reads part of a line. Returns `true` if the line has ended.
fn read(mut stream: &UnixStream, line: &mut Vec<u8>) -> io::Result<Option<()>> {
    let mut part = [0; PART];
    let read = match stream.read(&mut part) {
        Ok(read) => read,
        Err(error) if is_early(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    let part = part.get(..read).unwrap_or_default();
    let end = part.iter().position(|&byte| byte == b'\n');
    line.extend_from_slice(part.get(..end.unwrap_or(read)).unwrap_or(part));
    let is_full = line.len() as u64 > LONGEST_REPLY;
    Ok((end.is_some() || read == 0 || is_full).then_some(()))
}

fn is_early(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::sync::Barrier;

    use super::super::super::timed::receive;
    use super::*;
    use crate::ledger::control::{PoolReport, ProcessReport};

    const LONG: Duration = Duration::from_secs(600);

    /// Returns `count` sockets and the processes that serve them.
    fn sockets(count: usize, at: &Path) -> Vec<(UnixListener, Control)> {
        let uid = rustix::process::geteuid().as_raw();
        let sockets = (0..count).map(|number| {
            let path = at.join(number.to_string());
            (UnixListener::bind(&path).unwrap(), Control::new(path, uid))
        });
        sockets.collect()
    }

    /// Each process answers when all have been asked, with more than a socket's buffer holds.
    #[test]
    fn all_processes_are_asked_before_any_answer_is_awaited() {
        let dir = tempfile::tempdir().unwrap();
        let (listeners, mut processes): (Vec<_>, Vec<_>) =
            sockets(9, dir.path()).into_iter().unzip();
        let asked = Barrier::new(listeners.len());
        processes.insert(3, Control::new(dir.path().join("none"), 0));
        let answers = std::thread::scope(|scope| {
            for (number, listener) in listeners.into_iter().enumerate() {
                let asked = &asked;
                scope.spawn(move || {
                    let (mut stream, _) = listener.accept().unwrap();
                    let request = receive(&stream, 1 << 10, Until::after(LONG)).unwrap();
                    assert_eq!(request, b"\"report\"");
                    asked.wait();
                    let pools = vec![PoolReport::default(); 5_000 + number];
                    let reply = Reply::Report(ProcessReport { pools });
                    let mut line = serde_json::to_vec(&reply).unwrap();
                    line.push(b'\n');
                    stream.write_all(&line).unwrap();
                });
            }
            ask(&processes, &Request::Report, LONG)
        });
        let pools = answers.iter().map(|it| match it {
            Ok(Reply::Report(report)) => Some(report.pools.len()),
            _ => None,
        });
        let pools: Vec<_> = pools.collect();
        assert!(matches!(answers[3], Err(ControlError::NotServed(_))));
        let expected = (5_000..5_003)
            .map(Some)
            .chain([None])
            .chain((5_003..5_009).map(Some));
        assert_eq!(pools, expected.collect::<Vec<_>>());
    }

    #[test]
    fn a_process_without_an_answer_is_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let (listeners, mut processes): (Vec<_>, Vec<_>) =
            sockets(2, dir.path()).into_iter().unzip();
        processes[1].uid += 1;
        let answers = ask(&processes, &Request::Report, Duration::from_millis(1));
        assert!(matches!(answers[0], Err(ControlError::TimedOut(_))));
        assert!(matches!(answers[1], Err(ControlError::OtherUser { .. })));
        drop(listeners);
        // Until it ends, a process that another test has started may have the sockets too.
        let until = Until::after(LONG);
        let are_refused = || {
            let answers = ask(&processes, &Request::Report, Duration::from_millis(10));
            let mut answers = answers.iter();
            answers.all(|it| matches!(it, Err(ControlError::NotServed(_))))
        };
        while !are_refused() {
            until.left().unwrap();
        }
        assert!(ask(&[], &Request::Report, LONG).is_empty());
    }
}
