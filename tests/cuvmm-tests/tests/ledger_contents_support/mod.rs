//! A ledger's file with any contents, and a process that uses it: every call succeeds or returns an
//! error that names the fault, and everything is given back.

use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cuvmm::driver::model::{ModelDriver, ModelOptions};
use cuvmm::driver::{Driver, HandleTypes};
use cuvmm::ledger::file_name;
use cuvmm::{Attachment, Device, Ledger, LedgerView, Limit, Offer, Pool};

/// Bytes of the ledger.
const LIMIT: u64 = 64 << 20;

/// The bytes of one change: when, the number of a word, and its value.
const RECORD: usize = 11;

/// Changes of a file's words, or its contents.
pub struct Input<'a> {
    whole: Option<&'a [u8]>,
    records: Vec<(bool, u64, u64)>,
}

impl<'a> Input<'a> {
    /// Reads any bytes: after a zero the contents of the file, otherwise changes of a new one.
    pub fn of(bytes: &'a [u8]) -> Self {
        let (whole, records) = match bytes {
            [0, rest @ ..] => (Some(rest), &[][..]),
            _ => (None, bytes),
        };
        let record = |it: &[u8]| {
            let number = u64::from(u16::from_le_bytes(it[1..3].try_into().unwrap()));
            let value = u64::from_le_bytes(it[3..].try_into().unwrap());
            (it[0] & 1 == 1, number, value)
        };
        Self {
            whole,
            records: records.chunks_exact(RECORD).map(record).collect(),
        }
    }

    /// Returns the bytes of changes: before the ledger is opened or while it is used, the number of
    /// a word, and its value.
    #[allow(dead_code)]
    pub fn bytes(changes: &[(bool, u16, u64)]) -> Vec<u8> {
        let record = |&(later, number, value): &(bool, u16, u64)| {
            let mut bytes = vec![2 | u8::from(later)];
            bytes.extend(number.to_le_bytes());
            bytes.extend(value.to_le_bytes());
            bytes
        };
        changes.iter().flat_map(record).collect()
    }

    /// Makes the changes of one time in a file.
    fn change(&self, path: &Path, later: bool) {
        let file = File::options().write(true).open(path).unwrap();
        let words = file.metadata().unwrap().len() / 8;
        for &(_, number, value) in self.records.iter().filter(|it| it.0 == later) {
            let at = 8 * (number % words.max(1));
            file.write_all_at(&value.to_le_bytes(), at).unwrap();
        }
    }
}

fn open(device: &Device, directory: &Path) -> Option<Ledger> {
    let ledger = Ledger::builder(device, directory).limit(LIMIT).name("one");
    ledger.open().ok()
}

/// Uses the ledger as a process does, and changes the file meanwhile.
fn work(device: &Device, ledger: &Ledger, input: &Input<'_>) {
    let pool = Pool::builder(device).limit(Limit::Bytes(LIMIT));
    let pool = pool.shareable(HandleTypes::POSIX_FD).ledger(ledger);
    let Ok(pool) = pool.build() else { return };
    let tenant = pool.tenant("t").register().unwrap();
    let granule = device.granularity();
    let first = tenant.try_allocate(granule).ok();
    input.change(ledger.path(), true);
    let shown = ledger.stats().to_string();
    assert!(!shown.contains('\0'));
    let short = Duration::from_millis(2);
    let second = tenant.block(3 * granule).timeout(short).allocate().ok();
    let _ = ledger.set_guarantee(2 * granule);
    let _ = ledger.set_process_limit(LIMIT / 2);
    let _ = ledger.set_priority(-1);
    let shared = first.as_ref().and_then(|block| {
        let parcel = Offer::block(block).ok()?.parcel().ok()?;
        Attachment::builder(device)
            .ledger(ledger)
            .open(&parcel)
            .ok()
    });
    drop((first, second));
    let _ = pool.trim(0);
    drop(shared);
    let _ = ledger.set_guarantee(0);
    drop(tenant);
    pool.close().unwrap();
}

/// Returns the folder for directories of ledgers: one on a file system that a ledger accepts.
pub fn folder() -> PathBuf {
    let memory = Path::new("/dev/shm");
    match memory.is_dir() {
        true => memory.to_owned(),
        false => std::env::temp_dir(),
    }
}

/// Opens a ledger whose file is that of the input, looks at it, and uses it. Returns `true` if it
/// could be opened.
pub fn survive(directory: &Path, bytes: &[u8]) -> bool {
    let input = Input::of(bytes);
    let driver = Arc::new(ModelDriver::new(ModelOptions::new().capacity(1 << 30)));
    let shared: Arc<dyn Driver> = driver.clone();
    let device = Device::open(shared, 0).unwrap();
    let path: PathBuf = directory.join(file_name(device.uuid()));
    let _ = std::fs::remove_file(&path);
    match input.whole {
        Some(contents) => {
            std::fs::write(&path, contents).unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        }
        None => {
            drop(open(&device, directory));
            input.change(&path, false);
        }
    }
    if let Ok(view) = LedgerView::open(&path) {
        let stats = view.stats();
        assert!(!stats.to_string().contains('\0'));
        for slot in [0, 1, 127, usize::MAX] {
            let control = view.control(slot);
            drop(control);
        }
    }
    let ledger = open(&device, directory);
    let is_open = ledger.is_some();
    if let Some(ledger) = ledger {
        work(&device, &ledger, &input);
    }
    drop(device);
    let live = driver.live();
    assert_eq!(live.physical_bytes, 0, "{live:?}");
    is_open
}
