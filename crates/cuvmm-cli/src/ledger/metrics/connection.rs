//! One connection of a client: reads a request, writes the answer and closes. No call blocks.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

/// The time in which a client has to send its whole request.
const READS: Duration = Duration::from_secs(5);

/// The time in which a client has to receive the answer.
const RECEIVES: Duration = Duration::from_secs(10);

/// The time in which a client has to close the connection. If the server closed first while the
/// client still sends, the answer would be lost.
const CLOSES: Duration = Duration::from_secs(1);

const LONGEST_REQUEST: usize = 8 << 10;

#[derive(Debug)]
pub(super) struct Connection {
    socket: OwnedFd,
    /// The deadline at which the connection is closed.
    pub(super) until: Instant,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    Reading(Vec<u8>),
    Asked(Method),
    Writing(Vec<u8>),
    /// The answer is written; the client has to close.
    Closing,
    Closed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    Get,
    /// Gets an answer without a body.
    Head,
}

/// An answer, still without its length.
#[derive(Debug)]
pub(super) struct Answer<'a> {
    pub(super) status: &'static str,
    pub(super) content_type: &'static str,
    pub(super) body: &'a str,
}

impl Connection {
    pub(super) fn new(socket: OwnedFd, now: Instant) -> Self {
        Self {
            socket,
            until: now + READS,
            phase: Phase::Reading(Vec::new()),
        }
    }

    pub(super) const fn events(&self) -> PollFlags {
        match self.phase {
            Phase::Writing(_) => PollFlags::OUT,
            _ => PollFlags::IN,
        }
    }

    pub(super) const fn is_closed(&self) -> bool {
        matches!(self.phase, Phase::Closed)
    }

    pub(super) const fn asks(&self) -> bool {
        matches!(self.phase, Phase::Asked(_))
    }

    /// Reads or writes as far as possible without blocking.
    pub(super) fn go_on(&mut self, now: Instant) {
        match &mut self.phase {
            Phase::Reading(_) => self.read(now),
            Phase::Writing(_) => self.write(now),
            Phase::Closing => self.discard(),
            Phase::Asked(_) | Phase::Closed => {}
        }
    }

    /// Ends a connection past its deadline. A client that has not sent its request gets status 408.
    pub(super) fn expire(&mut self, now: Instant) {
        match self.phase {
            Phase::Reading(_) => {
                self.refuse("408 Request Timeout", "the request came too slowly\n", now);
            }
            _ => self.phase = Phase::Closed,
        }
    }

    fn read(&mut self, now: Instant) {
        let Phase::Reading(request) = &mut self.phase else {
            return;
        };
        let mut part = [0; LONGEST_REQUEST];
        match recv(&self.socket, &mut part, RecvFlags::empty()) {
            Ok((_, 0)) => self.phase = Phase::Closed,
            Ok((_, read)) => {
                request.extend_from_slice(part.get(..read).unwrap_or(&part));
                let request = std::mem::take(request);
                match head(&request) {
                    Some(head) => self.understand(head, now),
                    None if request.len() >= LONGEST_REQUEST => {
                        let status = "431 Request Header Fields Too Large";
                        self.refuse(status, "the request is too long\n", now);
                    }
                    None => self.phase = Phase::Reading(request),
                }
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => self.phase = Phase::Closed,
        }
    }

    fn understand(&mut self, head: &[u8], now: Instant) {
        let line = head.split(|&byte| byte == b'\n').next();
        let line = line.and_then(|line| str::from_utf8(line).ok());
        let mut words = line.unwrap_or_default().split_whitespace();
        let (method, target, version) = (words.next(), words.next(), words.next());
        let is_http = version.is_some_and(|it| it.starts_with("HTTP/1."));
        let Some(target) = target.filter(|_| is_http && words.next().is_none()) else {
            return self.refuse("400 Bad Request", "it is no request\n", now);
        };
        let method = match method {
            Some("GET") => Method::Get,
            Some("HEAD") => Method::Head,
            _ => {
                let status = "405 Method Not Allowed\r\nAllow: GET, HEAD";
                return self.refuse(status, "only GET is answered\n", now);
            }
        };
        self.phase = Phase::Asked(method);
        if target.split('?').next() != Some("/metrics") {
            self.answer(
                &plain("404 Not Found", "the figures are at /metrics\n"),
                now,
            );
        }
    }

    fn refuse(&mut self, status: &'static str, body: &str, now: Instant) {
        self.phase = Phase::Asked(Method::Get);
        self.answer(&plain(status, body), now);
    }

    /// Begins to write an answer, if the client awaits one.
    pub(super) fn answer(&mut self, answer: &Answer<'_>, now: Instant) {
        let Phase::Asked(method) = self.phase else {
            return;
        };
        let Answer {
            status,
            content_type,
            body,
        } = answer;
        let length = body.len();
        let body = if method == Method::Head { "" } else { body };
        let bytes = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\n\
             Connection: close\r\n\r\n{body}"
        );
        self.phase = Phase::Writing(bytes.into_bytes());
        self.until = now + RECEIVES;
        self.write(now);
    }

    fn write(&mut self, now: Instant) {
        let Phase::Writing(bytes) = &mut self.phase else {
            return;
        };
        match send(&self.socket, bytes, SendFlags::NOSIGNAL) {
            Ok(sent) => drop(bytes.drain(..sent.min(bytes.len()))),
            Err(Errno::AGAIN | Errno::INTR) => return,
            Err(_) => return self.phase = Phase::Closed,
        }
        if bytes.is_empty() {
            self.until = now + CLOSES;
            self.phase = match shutdown(&self.socket, Shutdown::Write) {
                Ok(()) => Phase::Closing,
                Err(_) => Phase::Closed,
            };
        }
    }

    fn discard(&mut self) {
        let mut part = [0; LONGEST_REQUEST];
        match recv(&self.socket, &mut part, RecvFlags::empty()) {
            Ok((_, 1..)) | Err(Errno::AGAIN | Errno::INTR) => {}
            Ok((_, 0)) | Err(_) => self.phase = Phase::Closed,
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

pub(super) const fn plain<'a>(status: &'static str, body: &'a str) -> Answer<'a> {
    Answer {
        status,
        content_type: "text/plain; charset=utf-8",
        body,
    }
}

/// Returns the head of a request, if the empty line after it has arrived.
fn head(request: &[u8]) -> Option<&[u8]> {
    let end = |line: &[u8]| request.windows(line.len()).position(|it| it == line);
    let end = end(b"\r\n\r\n").or_else(|| end(b"\n\n"))?;
    request.get(..end)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn pair() -> (Connection, UnixStream, Instant) {
        let (own, other) = UnixStream::pair().unwrap();
        own.set_nonblocking(true).unwrap();
        let now = Instant::now();
        (Connection::new(own.into(), now), other, now)
    }

    fn answer_to(request: &[u8]) -> String {
        let (mut connection, mut other, now) = pair();
        other.write_all(request).unwrap();
        connection.go_on(now);
        connection.answer(&plain("200 OK", "figures"), now);
        assert!(matches!(connection.phase, Phase::Closing), "{connection:?}");
        let mut answer = String::new();
        other.read_to_string(&mut answer).unwrap();
        drop(other);
        connection.go_on(now);
        connection.go_on(now);
        assert!(connection.is_closed());
        answer
    }

    #[test]
    fn a_request_is_answered_as_its_line_says() {
        for (request, status, body) in [
            ("GET /metrics HTTP/1.1\r\nA: b\r\n\r\n", "200 OK", "figures"),
            ("GET /metrics?x HTTP/1.0\n\n", "200 OK", "figures"),
            ("HEAD /metrics HTTP/1.1\r\n\r\n", "200 OK", ""),
            (
                "GET / HTTP/1.1\r\n\r\n",
                "404 Not Found",
                "the figures are at /metrics\n",
            ),
            (
                "POST /metrics HTTP/1.1\r\n\r\nx",
                "405 Method",
                "only GET is answered\n",
            ),
            (
                "GET /metrics\r\n\r\n",
                "400 Bad Request",
                "it is no request\n",
            ),
            ("\r\n\r\n", "400 Bad Request", "it is no request\n"),
            (
                "\u{1b} \u{2028} HTTP/1.1\n\n",
                "400 Bad Request",
                "it is no request\n",
            ),
        ] {
            let answer = answer_to(request.as_bytes());
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status}")),
                "{answer}"
            );
            assert_eq!(answer.split_once("\r\n\r\n").unwrap().1, body, "{request}");
        }
        let long = [b'x'; LONGEST_REQUEST];
        assert!(answer_to(&long).starts_with("HTTP/1.1 431 "));
    }

    #[test]
    fn a_request_that_comes_byte_by_byte_has_one_deadline() {
        let (mut connection, mut other, now) = pair();
        for byte in b"GET /metrics HTTP/1.1\r\nA: b\r\n\r" {
            other.write_all(&[*byte]).unwrap();
            connection.go_on(now + 100 * MS);
            assert!(!connection.asks());
        }
        assert_eq!(connection.until, now + READS);
        connection.expire(now + READS);
        let mut answer = String::new();
        other.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
        assert_eq!(connection.until, now + READS + CLOSES);
        connection.expire(now + READS + CLOSES);
        assert!(connection.is_closed());
    }

    #[test]
    fn an_answer_that_is_read_slowly_has_one_deadline() {
        let (mut connection, mut other, now) = pair();
        other.write_all(b"GET /metrics HTTP/1.1\n\n").unwrap();
        connection.go_on(now);
        assert!(connection.asks());
        let body = "x".repeat(4 << 20);
        connection.answer(&plain("200 OK", &body), now + MS);
        assert_eq!(connection.events(), PollFlags::OUT);
        let mut part = vec![0; 1 << 20];
        other.read_exact(&mut part[..1000]).unwrap();
        connection.go_on(now + 2 * MS);
        assert_eq!(connection.until, now + MS + RECEIVES);
        connection.expire(now + MS + RECEIVES);
        assert!(connection.is_closed());
    }

    #[test]
    fn a_client_that_goes_away_costs_nothing() {
        let (mut connection, other, now) = pair();
        drop(other);
        connection.go_on(now);
        assert!(connection.is_closed());
        let (mut connection, mut other, now) = pair();
        other.write_all(b"GET /metrics HTTP/1.1\n\n").unwrap();
        connection.go_on(now);
        drop(other);
        connection.answer(&plain("200 OK", "figures"), now);
        assert!(connection.is_closed());
    }
}
