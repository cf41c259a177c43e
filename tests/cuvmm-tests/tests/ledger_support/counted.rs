//! A driver whose memory is counted by a [device](super::device) of several processes.
//!
//! `unsafe` is allowed here because methods of the trait are `unsafe`; the caller's promise is
//! passed on to the inner driver unchanged.
#![allow(unsafe_code)]

use std::ops::Deref;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuvmm::driver::Result;
use cuvmm::driver::{
    AccessDesc, AccessFlags, Advice, CUresult, Call, CaptureMode, CaptureStatus, CudaVersion,
    DeviceAddress, DeviceAttribute, DeviceMemory, Driver, DriverError, DriverKind, EventFlags,
    EventHandle, Exported, GranularityKind, GraphExecHandle, GraphHandle, HandleTypes,
    ImportSource, Location, MemPoolAttribute, MemPoolHandle, MemPoolProps, MemPoolTicket,
    MemoryInfo, Ordinal, OsHandle, PhysicalHandle, PhysicalProps, PointerAttribute, RangeAttribute,
    StreamFlags, StreamHandle,
};

use super::device::{Topic, ask, tell};

/// A driver that asks the device before it creates memory and tells it of released memory.
#[derive(Debug)]
pub struct CountedDriver {
    inner: Arc<dyn Driver>,
    pid: u32,
    device: Mutex<UnixStream>,
    /// The memory that this process has created: its handle, its size, and how often it must be
    /// released. Imported memory is counted where it was created.
    created: Mutex<Vec<(PhysicalHandle, u64, u32)>>,
}

impl CountedDriver {
    /// Connects this process to the device at a path.
    pub fn connect(path: &Path, inner: Arc<dyn Driver>) -> Arc<Self> {
        let device = UnixStream::connect(path).unwrap();
        let pid = std::process::id();
        assert!(ask(&device, Topic::Process, pid.into()));
        Arc::new(Self {
            inner,
            pid,
            device: Mutex::new(device),
            created: Mutex::default(),
        })
    }

    fn device(&self) -> MutexGuard<'_, UnixStream> {
        assert_eq!(std::process::id(), self.pid, "a forked child makes no call");
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn created(&self) -> MutexGuard<'_, Vec<(PhysicalHandle, u64, u32)>> {
        self.created.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a connection that a forked child can report faults over.
    pub fn fault_line(&self) -> impl Fn(u64) + use<> {
        let socket = self.device().try_clone().unwrap();
        // If the test has ended, nothing is there to be told.
        move |fault| drop(tell(&socket, Topic::Fault, fault))
    }
}

/// The calls that the device counts, and by `Deref` all others of the inner driver.
struct Calls<'a>(&'a CountedDriver);

impl Deref for Calls<'_> {
    type Target = dyn Driver;

    fn deref(&self) -> &Self::Target {
        &*self.0.inner
    }
}

impl Calls<'_> {
    fn create(&self, size: u64, props: &PhysicalProps, flags: u64) -> Result<PhysicalHandle> {
        let device = self.0.device();
        if !ask(&device, Topic::Create, size) {
            let code = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
            return Err(DriverError::new(Call::MemCreate, code));
        }
        let created = self.0.inner.create(size, props, flags);
        match &created {
            Ok(handle) => self.0.created().push((*handle, size, 1)),
            Err(_) => drop(ask(&device, Topic::Release, size)),
        }
        created
    }

    unsafe fn release(&self, handle: PhysicalHandle) -> Result<()> {
        let device = self.0.device();
        // SAFETY: the inner method requires what the caller of this method has promised.
        unsafe { self.0.inner.release(handle) }?;
        let mut created = self.0.created();
        if let Some(at) = created.iter().position(|it| it.0 == handle) {
            created[at].2 -= 1;
            if created[at].2 == 0 {
                let (_, size, _) = created.swap_remove(at);
                ask(&device, Topic::Release, size);
            }
        }
        Ok(())
    }

    fn retain(&self, address: DeviceAddress) -> Result<PhysicalHandle> {
        let handle = self.0.inner.retain(address)?;
        if let Some(created) = self.0.created().iter_mut().find(|it| it.0 == handle) {
            created.2 += 1;
        }
        Ok(handle)
    }
}

macro_rules! pass_on {
    (
        safe { $($file:ident: $call:ident = $name:ident($($arg:ident: $ty:ty),*) -> $out:ty;)* }
        unsafe {
            $($ufile:ident: $ucall:ident = $uname:ident($($uarg:ident: $uty:ty),*) -> $uout:ty;)*
        }
    ) => {
        impl Driver for CountedDriver {
            fn kind(&self) -> DriverKind {
                self.inner.kind()
            }

            fn device_memory(&self) -> DeviceMemory {
                self.inner.device_memory()
            }

            $(
                fn $name(&self, $($arg: $ty),*) -> Result<$out> {
                    Calls(self).$name($($arg),*)
                }
            )*

            $(
                unsafe fn $uname(&self, $($uarg: $uty),*) -> Result<$uout> {
                    // SAFETY: the inner method requires what the caller of this method has
                    // promised.
                    unsafe { Calls(self).$uname($($uarg),*) }
                }
            )*
        }
    };
}

cuvmm::driver::driver_methods! { pass_on }
