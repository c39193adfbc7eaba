//! Stop strings in text that arrives in pieces.
//!
//! The answer ends where a stop string first becomes complete, whatever the pieces are: the result
//! depends on the text alone. Of several that complete at the same character the longest wins.
//! Text that may still become a stop string is held back.

/// Where the text ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Match {
    pub stop: String,
}

/// Scans one answer.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    include: bool,
    /// Text not let through yet: it ends in a proper prefix of a stop string.
    held: String,
}

impl StopMatcher {
    /// `include`: the stop string stays in the text.
    pub fn new(stops: Vec<String>, include: bool) -> Self {
        Self { stops, include, held: String::new() }
    }

    /// Takes new text; gives the text that is certain by now, and the match that ends it.
    pub fn push(&mut self, text: &str) -> (String, Option<Match>) {
        if self.stops.is_empty() {
            return (text.to_owned(), None);
        }
        if text.is_empty() {
            return (String::new(), None);
        }
        self.held.push_str(text);
        if let Some((start, end, stop)) = self.first_match() {
            let cut = if self.include { end } else { start };
            let stop = stop.to_owned();
            self.held.truncate(cut);
            return (std::mem::take(&mut self.held), Some(Match { stop }));
        }
        let certain = self.held.len() - self.longest_prefix_at_end();
        let rest = self.held.split_off(certain);
        (std::mem::replace(&mut self.held, rest), None)
    }

    /// What was held back, once no more text comes.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// `(start, end, stop)` of the match that completes first, the longest of equals.
    fn first_match(&self) -> Option<(usize, usize, &str)> {
        let found = self.stops.iter().filter_map(|stop| {
            let start = self.held.find(stop.as_str())?;
            Some((start, start + stop.len(), stop.as_str()))
        });
        found.min_by_key(|(start, end, _)| (*end, *start))
    }

    /// Bytes at the end that are a proper prefix of a stop string, at most.
    fn longest_prefix_at_end(&self) -> usize {
        let of_stop = |stop: &String| {
            let most = (stop.len() - 1).min(self.held.len());
            (1..=most)
                .rev()
                .find(|len| self.held.as_bytes().ends_with(&stop.as_bytes()[..*len]))
                .filter(|len| self.held.is_char_boundary(self.held.len() - len))
                .unwrap_or(0)
        };
        self.stops.iter().map(of_stop).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes out of `text` cut into pieces of `size` characters, and the stop found.
    fn run(text: &str, stops: &[&str], include: bool, size: usize) -> (String, Option<String>) {
        let stops = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut matcher = StopMatcher::new(stops, include);
        let characters: Vec<char> = text.chars().collect();
        let mut out = String::new();
        for piece in characters.chunks(size) {
            let (certain, found) = matcher.push(&piece.iter().collect::<String>());
            out.push_str(&certain);
            if let Some(found) = found {
                return (out, Some(found.stop));
            }
        }
        (out + &matcher.flush(), None)
    }

    fn check(text: &str, stops: &[&str], expect: &str, stop: Option<&str>) {
        for size in 1..=text.chars().count().max(1) {
            let got = run(text, stops, false, size);
            assert_eq!(got, (expect.to_owned(), stop.map(str::to_owned)), "{text:?} by {size}");
            let (kept, _) = run(text, stops, true, size);
            assert_eq!(kept, expect.to_owned() + stop.unwrap_or(""), "{text:?} by {size}");
        }
    }

    #[test]
    fn finds_stops_wherever_pieces_end() {
        check("hello world", &[], "hello world", None);
        check("hello world", &["xyz"], "hello world", None);
        check("hello world", &["o w"], "hell", Some("o w"));
        check("hello", &["hello"], "", Some("hello"));
        check("hello", &["hellos"], "hello", None);
        // The one that completes first, not the one that starts first.
        check("abcd", &["abcd", "bc"], "a", Some("bc"));
        // Completing together: the longest.
        check("abcd", &["cd", "bcd"], "a", Some("bcd"));
        check("aaab", &["aab"], "a", Some("aab"));
        check("ababac", &["abac"], "ab", Some("abac"));
        check("\n\n\nQ:", &["\n\nQ:"], "\n", Some("\n\nQ:"));
        check("日本語です", &["語で"], "日本", Some("語で"));
        // The last byte of a character is not the start of another one's.
        check("né", &["©"], "né", None);
        check("a😀b😀c", &["😀c"], "a😀b", Some("😀c"));
    }

    #[test]
    fn holds_back_no_more_than_a_possible_stop() {
        let mut matcher = StopMatcher::new(vec!["<end>".to_owned()], false);
        assert_eq!(matcher.push("abc<e").0, "abc");
        assert_eq!(matcher.push("x").0, "<ex");
        assert_eq!(matcher.push("<en").0, "");
        assert_eq!(matcher.flush(), "<en");
    }

    /// Against a plain search in the whole text, over all texts of a small alphabet.
    #[test]
    fn agrees_with_a_search_of_the_whole_text() {
        let stops = ["aab", "ba", "abba"];
        for number in 0..3_usize.pow(7) {
            let digits = (0..7).map(|place| number / 3_usize.pow(place) % 3);
            let text: String = digits.map(|digit| ['a', 'b', 'c'][digit]).collect();
            let ends = (1..=text.len()).find_map(|end| {
                let hits = stops.iter().filter(|stop| text[..end].ends_with(**stop));
                hits.max_by_key(|stop| stop.len()).map(|stop| (end - stop.len(), *stop))
            });
            let expect = match ends {
                Some((start, stop)) => (text[..start].to_owned(), Some(stop.to_owned())),
                None => (text.clone(), None),
            };
            for size in 1..=3 {
                assert_eq!(run(&text, &stops, false, size), expect, "{text} by {size}");
            }
        }
    }
}
