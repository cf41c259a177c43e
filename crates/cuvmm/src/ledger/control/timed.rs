//! Lines sent and received within a time, however slowly the other side reads or writes.
//!
//! A socket's own timeouts begin anew with each part, so each part gets the time that is left.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// The most bytes of one write, which the system sends with one timeout.
const PART: usize = 16 << 10;

/// Longer than any wait, and short enough for the system.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 86_400);

#[derive(Clone, Copy, Debug)]
pub(super) struct Until(Instant);

impl Until {
    pub(super) fn after(patience: Duration) -> Self {
        let now = Instant::now();
        Self(now.checked_add(patience.min(LONGEST)).unwrap_or(now))
    }

    pub(super) fn left(self) -> io::Result<Duration> {
        let left = self.0.saturating_duration_since(Instant::now());
        match left.is_zero() {
            true => Err(io::ErrorKind::TimedOut.into()),
            false => Ok(left),
        }
    }
}

/// Connects to a socket, and waits for a place in its queue.
pub(super) fn connect_to(path: &Path, until: Until) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    loop {
        set_socket_timeout(&socket, Timeout::Send, Some(until.left()?))?;
        match connect(&socket, &address) {
            Ok(()) => return Ok(socket.into()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Connects to a socket without waiting for a place in its queue. The connection does not block.
pub(super) fn connect_now(path: &Path) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let flags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
    let socket = socket_with(family, kind, flags, None)?;
    retry_on_intr(|| connect(&socket, &address))?;
    Ok(socket.into())
}

pub(super) fn send(mut stream: &UnixStream, mut bytes: &[u8], until: Until) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(until.left()?))?;
        match stream.write(bytes.get(..PART).unwrap_or(bytes)) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Receives up to the first line break or the end, at most `most` bytes.
pub(super) fn receive(stream: &UnixStream, most: u64, until: Until) -> io::Result<Vec<u8>> {
    let mut reader = BufReader::new(stream.take(most));
    let mut line = Vec::new();
    loop {
        stream.set_read_timeout(Some(until.left()?))?;
        let part = match reader.fill_buf() {
            Ok(part) => part,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let end = part.iter().position(|&byte| byte == b'\n');
        line.extend_from_slice(part.get(..end.unwrap_or(part.len())).unwrap_or(part));
        let (used, ended) = (end.map_or(part.len(), |end| end + 1), part.is_empty());
        reader.consume(used);
        if end.is_some() || ended {
            return Ok(line);
        }
    }
}
