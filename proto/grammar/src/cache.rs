//! What is known of the grammars that came lately.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use crate::Grammar;

/// Entries by grammar, the oldest dropped first, bounded in number and in bytes of text.
pub struct Cache<V> {
    entries: HashMap<Arc<Grammar>, V>,
    order: VecDeque<Arc<Grammar>>,
    bytes: usize,
    entries_most: usize,
    bytes_most: usize,
}

impl<V> Cache<V> {
    pub fn new(entries_most: usize, bytes_most: usize) -> Self {
        let (entries, order) = (HashMap::new(), VecDeque::new());
        Self { entries, order, bytes: 0, entries_most, bytes_most }
    }

    pub fn get(&self, grammar: &Grammar) -> Option<&V> {
        self.entries.get(grammar)
    }

    /// The newest entry stays, whatever its size.
    pub fn insert(&mut self, grammar: &Grammar, value: V) {
        if self.entries.contains_key(grammar) {
            return;
        }
        let key = Arc::new(grammar.clone());
        self.bytes += key.text.len();
        self.entries.insert(key.clone(), value);
        self.order.push_back(key);
        while self.order.len() > 1
            && (self.order.len() > self.entries_most || self.bytes > self.bytes_most)
        {
            let Some(oldest) = self.order.pop_front() else { return };
            self.bytes -= oldest.text.len();
            self.entries.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Inserts texts `0..count` of `bytes` bytes; how many of the newest are left.
    fn check(count: usize, bytes: usize, left: usize) {
        let text = |index: usize| Grammar::lark(format!("{index:0bytes$}"));
        let mut cache = Cache::new(3, 100);
        for index in 0..count {
            cache.insert(&text(index), index);
            cache.insert(&text(index), usize::MAX);
        }
        let kept: Vec<usize> =
            (0..count).filter_map(|index| cache.get(&text(index)).copied()).collect();
        assert_eq!(kept, (count - left..count).collect::<Vec<_>>(), "{count} of {bytes} bytes");
    }

    #[test]
    fn the_oldest_go_first() {
        check(2, 10, 2);
        check(5, 10, 3);
        check(5, 40, 2);
        check(5, 60, 1);
        check(5, 200, 1);
    }
}
