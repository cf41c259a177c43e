//! The values of handles.

/// Hands out values shaped like pointers. One value never names two things that live, of
/// whatever kinds.
#[derive(Debug)]
pub(crate) struct Handles {
    last: u64,
    /// Values whose things have gone, to be handed out again: the last gone first.
    gone: Vec<u64>,
    reuse: bool,
}

impl Handles {
    /// With `reuse`, a value whose thing has gone is the next that is handed out, for a thing of
    /// any kind. Without, no value comes twice.
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

    /// What this value named has gone.
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
