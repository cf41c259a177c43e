//! Blocks that are freed after their last tensor was dropped. Each operation checks a few of them,
//! so the cost of an operation does not grow with their number.

use std::collections::VecDeque;

/// The number of waiting entries that one operation checks. An operation adds at most one entry, so
/// the checks keep up.
const LOOKS: usize = 4;

/// An entry that waits for its last user.
pub(crate) trait Wait {
    /// Returns `true` if the entry may still be used. After `false` it stays `false`.
    fn is_used(&mut self) -> bool;

    fn bytes(&self) -> u64;
}

/// The waiting entries. The caller drops the returned entries while it holds no lock.
#[derive(Debug)]
pub(crate) struct Waiting<T> {
    queue: VecDeque<T>,
}

impl<T: Wait> Waiting<T> {
    pub(crate) const fn new() -> Self {
        let queue = VecDeque::new();
        Self { queue }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(crate) fn add(&mut self, one: T) {
        self.queue.push_back(one);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.queue.iter()
    }

    /// Removes and returns the entries without users among the least recently checked.
    pub(crate) fn take_some(&mut self) -> Vec<T> {
        self.take(LOOKS)
    }

    pub(crate) fn take_all(&mut self) -> Vec<T> {
        self.take(usize::MAX)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.queue.iter().map(T::bytes).sum()
    }

    fn take(&mut self, looks: usize) -> Vec<T> {
        let mut over = Vec::new();
        for _ in 0..looks.min(self.queue.len()) {
            let Some(mut one) = self.queue.pop_front() else {
                break;
            };
            match one.is_used() {
                true => self.queue.push_back(one),
                false => over.push(one),
            }
        }
        over
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    struct One {
        used: Rc<Cell<bool>>,
        looks: Rc<Cell<usize>>,
    }

    impl Wait for One {
        fn is_used(&mut self) -> bool {
            self.looks.set(self.looks.get() + 1);
            self.used.get()
        }

        fn bytes(&self) -> u64 {
            8
        }
    }

    #[test]
    fn an_operation_looks_at_no_more_however_many_wait() {
        let looks = Rc::new(Cell::new(0));
        let used: Vec<Rc<Cell<bool>>> = (0..1000).map(|_| Rc::new(Cell::new(true))).collect();
        let mut waiting = Waiting::new();
        for used in &used {
            let (used, looks) = (Rc::clone(used), Rc::clone(&looks));
            waiting.add(One { used, looks });
            assert!(waiting.take_some().is_empty());
        }
        assert!(looks.get() <= LOOKS * 1000, "{} looks", looks.get());
        assert_eq!(waiting.bytes(), 8000);

        // Every entry without users is found, in as many operations as it takes to check all.
        used.iter().step_by(3).for_each(|used| used.set(false));
        let found: usize = (0..1000_usize.div_ceil(LOOKS))
            .map(|_| waiting.take_some().len())
            .sum();
        assert_eq!((found, waiting.bytes()), (334, 666 * 8));
        used.iter().for_each(|used| used.set(false));
        assert_eq!(waiting.take_all().len(), 666);
        assert!(waiting.is_empty());
    }
}
