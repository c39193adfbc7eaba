//! Prompts of token ids that no cache knows.

/// Ids are taken from here: every vocabulary has them, and no text is needed.
const IDS: std::ops::Range<u32> = 32..256;

/// Gives a different prompt each time, the same ones in each run.
pub struct Prompts(u64);

impl Prompts {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self, tokens: usize) -> Vec<u32> {
        (0..tokens).map(|_| IDS.start + self.draw() % (IDS.end - IDS.start)).collect()
    }

    /// SplitMix64 (Steele, Lea, Flood 2014), its upper half.
    fn draw(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 32) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_differ_and_repeat_by_seed() {
        let draw = |seed| {
            let mut prompts = Prompts::new(seed);
            [prompts.next(20), prompts.next(20)]
        };
        let [a, b] = draw(1);
        assert_ne!(a, b);
        assert_eq!(draw(1), [a.clone(), b]);
        assert_ne!(draw(2)[0], a);
        assert!(a.iter().all(|id| IDS.contains(id)) && a.len() == 20);
        // The published first output for state 0.
        assert_eq!(Prompts(0).draw(), 0xe220_a839);
    }
}
