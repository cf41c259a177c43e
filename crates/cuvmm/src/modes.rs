//! New sockets and directories with a mode that the process's umask does not reduce.
//!
//! The umask takes away from the mode with which a file is made. So a file meant for other users
//! gets its mode after it was made, and by then its path may name another file: a user who may
//! write the directory can rename files in it. Therefore the new file carries a mark, the sticky
//! bit, which no umask takes away and which other sockets and private directories do not have. It
//! is opened without following a link, and its mode is set through that descriptor, only if it has
//! the mark and the expected type and belongs to this user.
//!
//! A file meant for this user alone has its mode from the beginning, and is not touched again.

use std::os::fd::{AsFd, AsRawFd as _};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, chmod, fchmod, fstat, mkdir, open, unlink};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::SocketAddrUnix;
use rustix::process::geteuid;

/// The bit that a new file has until it gets its mode (`S_ISVTX`).
const MARK: u32 = 0o1000;

/// The bits of a mode that concern other users.
const OTHERS: u32 = 0o077;

/// The bit with which files in a directory get the directory's group (`S_ISGID`). A directory
/// inherits it.
const GROUP: u32 = 0o2000;

/// A system call that failed, or [`Errno::STALE`] for a path that names another file than the new
/// one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failed {
    pub(crate) call: &'static str,
    pub(crate) errno: Errno,
}

impl Failed {
    /// Converts the error of a system call.
    pub(crate) fn of(call: &'static str) -> impl Fn(Errno) -> Self {
        move |errno| Self { call, errno }
    }
}

/// Binds a socket to a path. The socket's file has this mode. If that fails, the file is removed.
pub(crate) fn bind(
    socket: impl AsFd,
    address: &SocketAddrUnix,
    path: &Path,
    mode: u32,
) -> Result<(), Failed> {
    bind_then(socket, address, path, mode, || ())
}

/// Binds a socket, and calls a function between the making of its file and all that follows.
fn bind_then(
    socket: impl AsFd,
    address: &SocketAddrUnix,
    path: &Path,
    mode: u32,
    then: impl FnOnce(),
) -> Result<(), Failed> {
    // The socket's file gets the mode of the socket, reduced by the process's umask.
    let first = Mode::from_raw_mode(first_mode(mode));
    fchmod(&socket, first).map_err(Failed::of("fchmod"))?;
    rustix::net::bind(&socket, address).map_err(Failed::of("bind"))?;
    then();
    let admitted = admit(path, FileType::Socket, mode);
    if admitted.is_err() {
        // Follows no link. Removes no file that the user of the directory could not remove.
        let _ = unlink(path);
    }
    admitted
}

/// Makes a directory with this mode. Does nothing if there is a file at the path already.
pub(crate) fn make_directory(path: &Path, mode: u32) -> Result<(), Failed> {
    make_directory_then(path, mode, || ())
}

/// Makes a directory, and calls a function between its making and all that follows.
fn make_directory_then(path: &Path, mode: u32, then: impl FnOnce()) -> Result<(), Failed> {
    match mkdir(path, Mode::from_raw_mode(first_mode(mode))) {
        Ok(()) => {}
        Err(Errno::EXIST) => return Ok(()),
        Err(errno) => return Err(Failed::of("mkdir")(errno)),
    }
    then();
    admit(path, FileType::Directory, mode)
}

/// Returns the mode with which a file is made.
const fn first_mode(mode: u32) -> u32 {
    match mode & OTHERS {
        0 => mode,
        _ => mode & !OTHERS | MARK,
    }
}

/// Sets the mode of a new file meant for other users too.
fn admit(path: &Path, kind: FileType, mode: u32) -> Result<(), Failed> {
    if mode & OTHERS == 0 {
        return Ok(());
    }
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = retry_on_intr(|| open(path, flags, Mode::empty())).map_err(Failed::of("open"))?;
    let found = fstat(&file).map_err(Failed::of("fstat"))?;
    let is_new = FileType::from_raw_mode(found.st_mode) == kind
        && found.st_uid == geteuid().as_raw()
        && found.st_mode & (MARK | OTHERS) == MARK;
    if !is_new {
        return Err(Failed::of("open")(Errno::STALE));
    }
    let mode = Mode::from_raw_mode(mode | found.st_mode & GROUP);
    let file = format!("/proc/self/fd/{}", file.as_raw_fd());
    chmod(file, mode).map_err(Failed::of("chmod"))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
    use std::os::unix::net::UnixListener;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    use tempfile::TempDir;

    use super::*;

    fn mode(path: &Path) -> u32 {
        path.symlink_metadata().unwrap().mode() & 0o7777
    }

    fn socket() -> OwnedFd {
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap()
    }

    fn bound(path: &Path, mode: u32, then: impl FnOnce()) -> Result<(), Failed> {
        let address = SocketAddrUnix::new(path).unwrap();
        bind_then(socket(), &address, path, mode, then)
    }

    const ANOTHER: Failed = Failed {
        call: "open",
        errno: Errno::STALE,
    };

    #[test]
    fn a_private_file_has_its_mode_when_it_is_made_and_keeps_it() {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("socket");
        let secret = directory.path().join("secret");
        fs::write(&secret, "").unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o640)).unwrap();
        let swap = || {
            assert_eq!(mode(&path), 0o600);
            fs::remove_file(&path).unwrap();
            symlink(&secret, &path).unwrap();
        };
        bound(&path, 0o600, swap).unwrap();
        assert_eq!(mode(&secret), 0o640);
        let path = directory.path().join("directory");
        let swap = || {
            assert_eq!(mode(&path), 0o700);
            fs::remove_dir(&path).unwrap();
            symlink(&secret, &path).unwrap();
        };
        make_directory_then(&path, 0o700, swap).unwrap();
        assert_eq!(mode(&secret), 0o640);
    }

    #[test]
    fn a_file_for_others_is_for_no_other_before_it_has_its_mode() {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("socket");
        for to in [0o660, 0o666] {
            bound(&path, to, || assert_eq!(mode(&path), 0o1600)).unwrap();
            assert_eq!(mode(&path), to);
            fs::remove_file(&path).unwrap();
        }
        let path = directory.path().join("directory");
        make_directory_then(&path, 0o770, || assert_eq!(mode(&path), 0o1700)).unwrap();
        assert_eq!(mode(&path), 0o770);
        let under = |then: fn()| make_directory_then(&path.join("inner"), 0o770, then);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o2770)).unwrap();
        under(|| ()).unwrap();
        assert_eq!(mode(&path.join("inner")), 0o2770, "it inherits the group");
        under(|| panic!("it is there already")).unwrap();
    }

    /// Another user who may write the directory puts another file in the place of the new one.
    #[test]
    fn a_file_that_takes_the_place_of_a_new_one_keeps_its_mode() {
        let directory = TempDir::new().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("secret"), "").unwrap();
        fs::create_dir(at("private")).unwrap();
        drop(UnixListener::bind(at("agent")).unwrap());
        for (name, mode) in [("secret", 0o600), ("private", 0o700), ("agent", 0o600)] {
            fs::set_permissions(at(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        let modes = || ["secret", "private", "agent"].map(|name| mode(&at(name)));
        let before = modes();
        type Put = fn(&Path, &Path);
        let link: Put = |from, to| symlink(from, to).unwrap();
        let hard: Put = |from, to| fs::hard_link(from, to).unwrap();
        for (from, put) in [
            ("secret", link),
            ("secret", hard),
            ("private", link),
            ("agent", link),
            ("agent", hard),
        ] {
            let (from, path) = (at(from), at("socket"));
            let swap = || {
                fs::rename(&path, at("aside")).unwrap();
                put(&from, &path);
            };
            assert_eq!(bound(&path, 0o660, swap), Err(ANOTHER));
            assert!(path.symlink_metadata().is_err(), "it is removed");
            let path = at("directory");
            let swap = || {
                fs::remove_dir(&path).unwrap();
                put(&from, &path);
            };
            assert_eq!(make_directory_then(&path, 0o770, swap), Err(ANOTHER));
            fs::remove_file(&path).unwrap();
            fs::remove_file(at("aside")).unwrap();
        }
        let path = at("directory");
        let swap = || {
            fs::rename(at("private"), &path).unwrap();
        };
        assert_eq!(make_directory_then(&path, 0o770, swap), Err(ANOTHER));
        fs::rename(&path, at("private")).unwrap();
        assert_eq!(modes(), before);
    }
}
