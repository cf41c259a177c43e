//! The values of handles.

/// An allocator of handle values shaped like pointers. No value names two live objects, of whatever
/// kinds.
#[derive(Debug)]
pub(crate) struct Handles {
    last: u64,
    /// Reusable values of destroyed objects, in order of destruction. The last is reused first.
    gone: Vec<u64>,
    reuse: bool,
}

impl Handles {
    /// Creates an allocator. With `reuse`, the next value is that of the object destroyed last, of
    /// any kind; otherwise every value is used once.
    pub(crate) fn new(reuse: bool) -> Self {
        Self {
            last: 0x1000,
            gone: Vec::new(),
            reuse,
        }
    }

    pub(crate) fn take(&mut self) -> u64 {
        if let Some(value) = self.gone.pop() {
            return value;
        }
        self.last += 0x10;
        self.last
    }

    pub(crate) fn give_back(&mut self, value: u64) {
        if self.reuse {
            self.gone.push(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Handles;

    #[test]
    fn the_last_gone_comes_first() {
        let mut handles = Handles::new(true);
        let (first, second) = (handles.take(), handles.take());
        handles.give_back(first);
        handles.give_back(second);
        assert_eq!([handles.take(), handles.take()], [second, first]);
        assert!(![first, second].contains(&handles.take()));
    }

    #[test]
    fn no_value_comes_twice_unless_asked_for() {
        let mut handles = Handles::new(false);
        let first = handles.take();
        handles.give_back(first);
        assert_ne!(handles.take(), first);
    }
}
