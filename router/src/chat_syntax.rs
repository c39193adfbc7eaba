//! How the served model writes what is not plain text: calls of tools, and thought.

use trireme_grammar::{Marker, Vocabulary};

use crate::{
    reasoning::{self, Thinking, Thought},
    tools::ToolSyntax,
};

/// What the operator says of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Parser<T> {
    /// By the chat template and the vocabulary.
    #[default]
    Auto,
    /// The model has none.
    None,
    Of(T),
}

impl<T: std::str::FromStr> std::str::FromStr for Parser<T> {
    type Err = T::Err;
    fn from_str(name: &str) -> Result<Self, T::Err> {
        match name {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            name => name.parse().map(Self::Of),
        }
    }
}

impl<T> Parser<T> {
    fn resolve(self, detect: impl FnOnce() -> Option<T>) -> Option<T> {
        match self {
            Self::Auto => detect(),
            Self::None => None,
            Self::Of(given) => Some(given),
        }
    }
}

/// Both parsers, as given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parsers {
    pub tools: Parser<ToolSyntax>,
    pub thinking: Parser<Thinking>,
}

/// What is known of a model's answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatSyntax {
    /// `None`: its way to call is not known.
    pub tools: Option<ToolSyntax>,
    /// `None`: it does not think aloud.
    pub thinking: Option<Thinking>,
    /// Markers of calls and thoughts that are special tokens, with their ids.
    markers: Vec<(&'static str, u32)>,
}

impl ChatSyntax {
    /// `templates`: the sources of all its chat templates.
    pub fn of(parsers: Parsers, templates: &str, vocabulary: &Vocabulary) -> Self {
        let special = |text: &str| {
            let found = vocabulary.special().find(|(_, bytes)| *bytes == text.as_bytes());
            found.map(|(id, _)| id)
        };
        let has_token = |text: &str| {
            special(text).is_some() || vocabulary.words.iter().any(|word| word == text.as_bytes())
        };
        let tools = parsers.tools.resolve(|| ToolSyntax::detect(templates, has_token));
        let thinks = || {
            let is_tagged = templates.contains(reasoning::CLOSE) || has_token(reasoning::CLOSE);
            is_tagged.then_some(Thinking::WhereOpened)
        };
        let markers = tools.map_or(&[][..], ToolSyntax::markers).iter();
        let markers = markers.chain(&[reasoning::OPEN, reasoning::CLOSE]);
        Self {
            tools,
            thinking: parsers.thinking.resolve(thinks),
            markers: markers.filter_map(|marker| Some((*marker, special(marker)?))).collect(),
        }
    }

    /// What may be thought before an answer under a grammar.
    pub fn thought(&self) -> Option<Box<Thought>> {
        let marker = |text| self.marker_id(text).map_or(Marker::Text(text), Marker::Special);
        let [open, close] = [reasoning::OPEN, reasoning::CLOSE].map(marker);
        self.thinking.map(|thinking| Box::new(Thought { thinking, open, close }))
    }

    /// The id of a marker that is a special token.
    pub fn marker_id(&self, marker: &str) -> Option<u32> {
        self.markers.iter().find(|(text, _)| *text == marker).map(|(_, id)| *id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A vocabulary of one special token, one other, and an end.
    fn check(template: &str, special: &str, plain: &str, expected: (Option<&str>, bool)) {
        let words = [(special.as_bytes(), true), (plain.as_bytes(), false), (&b"</s>"[..], true)];
        let vocabulary = Vocabulary::new(words, &[2]);
        let syntax = ChatSyntax::of(Parsers::default(), template, &vocabulary);
        let tools = syntax.tools.map(|tools| tools.to_string());
        assert_eq!(
            (tools.as_deref(), syntax.thinking.is_some()),
            expected,
            "{template} {special} {plain}"
        );
        for marker in syntax.tools.map_or(&[][..], ToolSyntax::markers) {
            assert_eq!(syntax.marker_id(marker).is_some(), *marker == special, "{marker}");
        }
    }

    #[test]
    fn the_syntax_is_found_in_template_and_vocabulary() {
        check("{{ messages }}", "<x>", "y", (None, false));
        check("within <tool_call></tool_call> tags", "<x>", "y", (Some("hermes"), false));
        check("", "<x>", "<tool_call>", (Some("hermes"), false));
        check("", "[TOOL_CALLS]", "y", (Some("mistral"), false));
        check("", "<|python_tag|>", "y", (Some("llama3_json"), false));
        check("[func_name1(params)]", "<|python_tag|>", "y", (Some("pythonic"), false));
        check("{{ content.split('</think>') }}", "<x>", "y", (None, true));
        check("", "<x>", "</think>", (None, true));
    }

    #[test]
    fn the_operator_has_the_last_word() {
        let check = |tools: &str, thinking: &str, expected: (Option<&str>, Option<&str>)| {
            let parsers = Parsers {
                tools: tools.parse().expect("a parser"),
                thinking: thinking.parse().expect("a parser"),
            };
            let vocabulary = Vocabulary::default();
            let syntax = ChatSyntax::of(parsers, "<tool_call> </think>", &vocabulary);
            let told =
                (syntax.tools.map(|t| t.to_string()), syntax.thinking.map(|t| t.to_string()));
            assert_eq!((told.0.as_deref(), told.1.as_deref()), expected, "{tools} {thinking}");
        };
        check("auto", "auto", (Some("hermes"), Some("think")));
        check("none", "none", (None, None));
        check("mistral", "deepseek_r1", (Some("mistral"), Some("deepseek_r1")));
        assert!("xml".parse::<Parser<ToolSyntax>>().is_err());
        assert!("xml".parse::<Parser<Thinking>>().is_err());
    }
}
