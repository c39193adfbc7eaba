//! What can be told of a template from its source.

/// How an access to a message's content ends.
const CONTENT: [&str; 3] = ["content", "['content']", "[\"content\"]"];
/// Methods with which templates look for a token in what a message says.
const SEARCHES: [&str; 11] = [
    "split(",
    "rsplit(",
    "partition(",
    "rpartition(",
    "startswith(",
    "endswith(",
    "find(",
    "rfind(",
    "index(",
    "count(",
    "replace(",
];

/// Whether a template looks for `token` in a message (`'</think>' in content`,
/// `content.split('</think>')`), rather than only writing it.
pub fn looks_for(source: &str, token: &str) -> bool {
    source.match_indices(token).any(|(at, _)| {
        let (before, after) = (&source[..at], &source[at + token.len()..]);
        let quoted = |quote| Some((before.strip_suffix(quote)?, after.strip_prefix(quote)?));
        let Some((before, after)) = quoted('\'').or_else(|| quoted('"')) else { return false };
        let (before, after) = (before.trim_end(), after.trim_start());
        let is_tested = ["in ", "not in "].iter().any(|test| after.starts_with(test));
        is_tested || SEARCHES.iter().any(|search| before.ends_with(search))
    })
}

/// The forms of a message that a template knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KnownForms {
    /// It goes through the parts of a content; else it takes a string.
    pub parts: bool,
    /// It asks whether a content is `none`; else it writes every content.
    pub none: bool,
    /// It has a place for OpenAI's role `developer`.
    pub developer: bool,
}

impl KnownForms {
    pub fn of(source: &str) -> Self {
        let asks = |access: &str| {
            ["", "not "].iter().any(|not| source.contains(&format!("{access} is {not}none")))
        };
        Self {
            parts: takes_parts(source),
            none: CONTENT.iter().any(|access| asks(access)),
            developer: source.contains("developer"),
        }
    }
}

/// `for part in message['content']`.
fn takes_parts(source: &str) -> bool {
    let mut rest = source;
    while let Some((_, tag)) = rest.split_once("{%") {
        let (inner, after) = tag.split_once("%}").unwrap_or((tag, ""));
        let inner = inner.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        if let Some((_, over)) =
            inner.strip_prefix("for ").and_then(|r#loop| r#loop.split_once(" in "))
        {
            let over = over.split([' ', '|']).next().unwrap_or_default();
            if CONTENT.iter().any(|end| over.ends_with(end)) {
                return true;
            }
        }
        rest = after;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_looks_for_tokens_or_writes_them() {
        let check = |source, expected| assert_eq!(looks_for(source, "</t>"), expected, "{source}");
        check("{% if '</t>' in content %}", true);
        check("{% if \"</t>\" not in content %}", true);
        check("{{ content.split('</t>')[-1] }}", true);
        check("{{ content.split( \"</t>\" )[-1] }}", true);
        check("{{ '<t>' + content + '</t>' }}", false);
        check("<t>{{ content }}</t>", false);
        check("{{ content.split('x</t>')[0] }}", false);
        check("", false);
    }

    #[test]
    fn a_template_takes_parts_or_a_string() {
        let check = |source, expected| assert_eq!(takes_parts(source), expected, "{source}");
        check("{%- for item in message['content'] -%}{% endfor %}", true);
        check("{% for part in message.content | reject('x') %}{% endfor %}", true);
        check("{% for c in content if c.type == 'text' %}{% endfor %}", true);
        check("{% for message in messages %}{{ message['content'] }}{% endfor %}", false);
        check("{% if message['content'] is iterable %}{% endif %}", false);
        check("{% for", false);
    }

    #[test]
    fn a_template_knows_some_forms() {
        let check = |source, none, developer| {
            let expected = KnownForms { parts: false, none, developer };
            assert_eq!(KnownForms::of(source), expected, "{source}");
        };
        check("{% if message['content'] is none %}", true, false);
        check("{% if message.content is not none and x %}", true, false);
        check("{{ message.content }}{% if x is none %}", false, false);
        check("{% if message.role == 'developer' %}", false, true);
    }
}
