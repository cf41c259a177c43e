//! The backends that run without a GPU. They run one at a time, because addresses that one test
//! uses would change another test's answers.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use conformance::{Isolate, KernelToucher, MachineToucher, Recording, Report, Suite};
use cuvmm_driver::Driver;
use cuvmm_driver::cuda::CudaDriver;
use cuvmm_model::host::{HostDriver, HostOptions};
use cuvmm_model::model::{Backing, Machine, ModelDriver, ModelOptions};

#[path = "../../../fakecuda/testing/built.rs"]
mod built;

/// One backend by name: `model`, `host` or `fakecuda`.
pub(crate) struct Backend {
    pub(crate) driver: Arc<dyn Driver>,
    kernels: Option<Arc<dyn KernelToucher>>,
    isolate: Isolate,
    _turn: MutexGuard<'static, ()>,
    /// The directory of the library that the driver was loaded from.
    _directory: Option<tempfile::TempDir>,
}

impl Backend {
    pub(crate) fn open(name: &str) -> Self {
        match name {
            "model" => Self::machine(name, ModelDriver::new(ModelOptions::new())),
            "host" => Self::machine(name, HostDriver::new(HostOptions::new())),
            "fakecuda" => Self::fakecuda(),
            other => panic!("there is no backend {other}"),
        }
    }

    pub(crate) fn machine<B: Backing>(name: &str, machine: Machine<B>) -> Self {
        let machine = Arc::new(machine);
        Self {
            kernels: Some(Arc::new(MachineToucher::new(Arc::clone(&machine)))),
            driver: machine,
            isolate: isolate(name),
            _turn: turn(),
            _directory: None,
        }
    }

    fn fakecuda() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let library = built::fakecuda_in(directory.path());
        // SAFETY: the stand-in was just built from this workspace.
        let driver = unsafe { CudaDriver::open_library(&library) }.unwrap();
        Self {
            driver: Arc::new(driver),
            kernels: None,
            isolate: isolate(&format!("cuda:{}", library.display())),
            _turn: turn(),
            _directory: Some(directory),
        }
    }

    /// Runs all cases whose name contains `filter`, except the slow ones.
    pub(crate) fn report(&self, filter: &str) -> Report {
        Suite::new(Arc::clone(&self.driver))
            .kernels(self.kernels.clone())
            .isolate(self.isolate.clone())
            .housekeeping(0)
            .filter(filter)
            .run(|_, _| ())
            .unwrap()
    }
}

fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn isolate(backend: &str) -> Isolate {
    Isolate::new(env!("CARGO_BIN_EXE_conformance-one"), [backend])
}

/// Returns the committed recordings with their file names.
pub(crate) fn recordings() -> Vec<(PathBuf, Recording)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("answers");
    let mut paths: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "json")
        })
        .collect();
    paths.sort();
    paths
        .into_iter()
        .map(|path| {
            let recording = Recording::read(&path).unwrap();
            (path, recording)
        })
        .collect()
}
