//! Pseudorandom choices, which are equal for equal seeds.

/// The generator SplitMix64.
#[derive(Clone, Debug)]
pub(crate) struct Chance(u64);

impl Chance {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns `true` one time in `n` on average; never for 0.
    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        n != 0 && self.next().is_multiple_of(n)
    }

    pub(crate) fn one_of<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        let count = u64::try_from(from.len()).ok().filter(|&count| count != 0)?;
        let index = usize::try_from(self.next() % count).ok()?;
        from.get(index).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::Chance;

    #[test]
    fn the_same_seed_chooses_the_same() {
        let choices = |seed| {
            let mut chance = Chance::new(seed);
            [(); 64].map(|()| chance.one_of(&[1, 2, 3]))
        };
        assert_eq!(choices(7), choices(7));
        assert_ne!(choices(7), choices(8));
        assert!([1, 2, 3].iter().all(|&one| choices(7).contains(&Some(one))));
        assert_eq!(Chance::new(7).one_of::<u8>(&[]), None);
    }

    #[test]
    fn one_time_in_n() {
        let mut chance = Chance::new(1);
        let often = (0..10_000).filter(|_| chance.one_in(10)).count();
        assert!((800..1200).contains(&often), "{often}");
        assert!((0..1000).all(|_| !chance.one_in(0)));
        assert!((0..1000).all(|_| chance.one_in(1)));
    }
}
