//! Sites: the places in the program where an object was made, released or misused.
//!
//! A site is captured as bare addresses, which is cheap, and gets its names when it is printed.

use std::ffi::c_void;
use std::sync::Arc;

use super::python::{self, Line};
use crate::calls;
use crate::loaded::{self, Module};

const DEPTH: usize = 48;

/// A call of the program, with the frames that led to it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Site {
    /// The C function that was called.
    pub(crate) call: &'static str,
    /// Return addresses, the innermost first.
    native: Vec<usize>,
    /// Lines of the Python program, the innermost first; empty in other programs.
    pub(crate) python: Vec<Line>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Frame {
    pub(crate) function: Option<String>,
    pub(crate) file: Option<String>,
    pub(crate) line: Option<u32>,
    pub(crate) module: Option<String>,
    pub(crate) offset: usize,
}

impl Site {
    /// Captures the site of the C function that this thread is in.
    pub(crate) fn here() -> Arc<Self> {
        let mut native = Vec::with_capacity(DEPTH);
        backtrace::trace(|frame| {
            // Some stacks end with a frame without an address.
            native.extend(Some(frame.ip().addr()).filter(|&address| address != 0));
            native.len() < DEPTH
        });
        Arc::new(Self {
            call: calls::current(),
            native,
            python: python::lines(),
        })
    }

    /// Returns the module whose code made the call.
    pub(crate) fn caller(&self) -> Option<Module> {
        let ours = loaded::of(loaded::own()).map(|module| module.base);
        let mut modules = self
            .native
            .iter()
            .filter_map(|&address| loaded::of(address));
        modules.find(|module| Some(module.base) != ours)
    }

    /// Returns the native frames from the caller of the C function to `main`.
    pub(crate) fn frames(&self) -> Vec<Frame> {
        let ours = loaded::of(loaded::own()).map(|module| module.base);
        let outside = |&&address: &&usize| loaded::of(address).map(|found| found.base) != ours;
        let mut frames = Vec::new();
        let mut inside = true;
        for address in &self.native {
            inside = inside && !outside(&address);
            if inside {
                continue;
            }
            for frame in named(*address) {
                let name = frame.function.as_deref().unwrap_or_default();
                // Rust's runtime calls `main`, and a thread's function, by a function of this name.
                if name.contains("__rust_begin_short_backtrace") {
                    return frames;
                }
                let last = name == "main";
                frames.push(frame);
                if last {
                    return frames;
                }
            }
        }
        frames
    }
}

/// Returns the frames of a return address: several if functions were inlined.
fn named(address: usize) -> Vec<Frame> {
    let module = loaded::of(address);
    let bare = Frame {
        module: module.as_ref().map(|module| module.path.clone()),
        offset: address - module.as_ref().map_or(0, |module| module.base),
        ..Frame::default()
    };
    let mut frames = Vec::new();
    let pointer: *mut c_void = std::ptr::with_exposed_provenance_mut(address);
    backtrace::resolve(pointer, |symbol| {
        frames.push(Frame {
            function: symbol.name().map(|name| format!("{name:#}")),
            file: symbol.filename().map(|path| path.display().to_string()),
            line: symbol.lineno(),
            ..bare.clone()
        });
    });
    if frames.is_empty() {
        frames.push(bare);
    }
    frames
}
