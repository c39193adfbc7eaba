//! Outcomes to figures, as lm-evaluation-harness computes them.

use std::f64::consts::LN_2;

use serde::Serialize;

use super::task::{Choice, Documents, Generate, Rolling};

/// How likely some text is after its context.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Score {
    /// Natural log, summed over the tokens.
    pub logprob: f64,
    /// Every token of it was the likeliest one.
    pub is_greedy: bool,
}

/// What came of one document.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Outcome {
    /// Of each continuation.
    Scores(Vec<Score>),
    Text(String),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    pub name: &'static str,
    pub value: f64,
}

pub fn metrics(documents: &Documents, outcomes: &[Outcome]) -> Vec<Metric> {
    let scores: Vec<&[Score]> = outcomes
        .iter()
        .filter_map(|outcome| match outcome {
            Outcome::Scores(scores) => Some(scores.as_slice()),
            Outcome::Text(_) => None,
        })
        .collect();
    let firsts = || scores.iter().filter_map(|scores| scores.first());
    match documents {
        Documents::Choice(documents) => choice(documents, &scores),
        Documents::Loglikelihood(_) => {
            let logprob = mean(firsts().map(|score| score.logprob));
            let acc = mean(firsts().map(|score| f64::from(u8::from(score.is_greedy))));
            vec![metric("acc", acc), metric("perplexity", (-logprob).exp())]
        }
        Documents::Rolling(documents) => {
            rolling(documents, firsts().map(|score| score.logprob).sum())
        }
        Documents::Generate(documents) => generate(documents, outcomes),
    }
}

fn metric(name: &'static str, value: f64) -> Metric {
    Metric { name, value }
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0usize), |(sum, count), value| (sum + value, count + 1));
    sum / count as f64
}

/// `acc` takes the likeliest choice, `acc_norm` the likeliest for its number of characters.
fn choice(documents: &[Choice], scores: &[&[Score]]) -> Vec<Metric> {
    let right = |norm: bool| {
        let hits = documents.iter().zip(scores).map(|(document, scores)| {
            let values = document.choices.iter().zip(*scores).map(|(choice, score)| {
                let chars = choice.chars().count().max(1);
                if norm { score.logprob / chars as f64 } else { score.logprob }
            });
            // The first of equals, as numpy's argmax.
            let best =
                values.enumerate().reduce(|best, next| if next.1 > best.1 { next } else { best });
            f64::from(u8::from(best.is_some_and(|(index, _)| index == document.answer)))
        });
        mean(hits)
    };
    vec![metric("acc", right(false)), metric("acc_norm", right(true))]
}

fn rolling(documents: &[Rolling], logprob: f64) -> Vec<Metric> {
    // Pieces between blanks, empty ones at the ends included: Python's `re.split(r"\s+", text)`.
    let words = |text: &str| {
        let ends = usize::from(text.starts_with(char::is_whitespace))
            + usize::from(text.ends_with(char::is_whitespace));
        text.split_whitespace().count() + ends
    };
    let words: usize = documents.iter().map(|document| words(&document.text)).sum();
    let bytes: usize = documents.iter().map(|document| document.text.len()).sum();
    vec![
        metric("word_perplexity", (-logprob / words as f64).exp()),
        metric("byte_perplexity", (-logprob / bytes as f64).exp()),
        metric("bits_per_byte", -logprob / bytes as f64 / LN_2),
    ]
}

/// Of the documents with a target; blanks around do not matter.
fn generate(documents: &[Generate], outcomes: &[Outcome]) -> Vec<Metric> {
    let judged: Vec<bool> = documents
        .iter()
        .zip(outcomes)
        .filter_map(|(document, outcome)| match (&document.target, outcome) {
            (Some(target), Outcome::Text(text)) => Some(target.trim() == text.trim()),
            _ => None,
        })
        .collect();
    if judged.is_empty() {
        return vec![metric("answered", outcomes.len() as f64)];
    }
    vec![metric("exact_match", mean(judged.into_iter().map(|hit| f64::from(u8::from(hit)))))]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scores(logprobs: &[f64]) -> Outcome {
        let score = |logprob: &f64| Score { logprob: *logprob, is_greedy: *logprob > -1.0 };
        Outcome::Scores(logprobs.iter().map(score).collect())
    }

    fn check(documents: Documents, outcomes: &[Outcome], expected: &[(&'static str, f64)]) {
        let found = metrics(&documents, outcomes);
        assert_eq!(found.len(), expected.len(), "{found:?}");
        for (metric, (name, value)) in found.iter().zip(expected) {
            assert_eq!(metric.name, *name);
            assert!((metric.value - value).abs() < 1e-9, "{found:?}, expected {expected:?}");
        }
    }

    #[test]
    fn figures_are_the_harness_ones() {
        let choice = |answer| Choice {
            context: String::new(),
            choices: vec!["ab".into(), "abcdefgh".into()],
            answer,
        };
        let outcomes = [scores(&[-2.0, -4.0]), scores(&[-3.0, -3.0])];
        // By characters -1 and -0.5: the second; the tie goes to the first, by characters not.
        let expected = [("acc", 0.0), ("acc_norm", 1.0)];
        check(Documents::Choice(vec![choice(1), choice(1)]), &outcomes, &expected);
        let expected = [("acc", 0.5), ("acc_norm", 0.5)];
        check(Documents::Choice(vec![choice(0), choice(1)]), &outcomes, &expected);

        let pairs = Documents::Loglikelihood(Vec::new());
        let expected = [("acc", 0.5), ("perplexity", 1.25_f64.exp())];
        check(pairs, &[scores(&[-2.0]), scores(&[-0.5])], &expected);

        let text = |text: &str| Rolling { text: text.into() };
        let texts = Documents::Rolling(vec![text("two words "), text("é")]);
        // Four words, the empty one at the end among them; twelve bytes.
        let expected = [
            ("word_perplexity", (6.0_f64 / 4.0).exp()),
            ("byte_perplexity", (6.0_f64 / 12.0).exp()),
            ("bits_per_byte", 0.5 / LN_2),
        ];
        check(texts, &[scores(&[-4.0]), scores(&[-2.0])], &expected);

        let prompt = |target: Option<&str>| Generate {
            prompt: String::new(),
            until: vec![],
            max_new_tokens: 1,
            target: target.map(str::to_owned),
        };
        let answer = |text: &str| Outcome::Text(text.to_owned());
        let prompts = vec![prompt(Some("4")), prompt(Some("5")), prompt(None)];
        let answers = [answer(" 4\n"), answer("6"), answer("7")];
        check(Documents::Generate(prompts), &answers, &[("exact_match", 0.5)]);
        check(Documents::Generate(vec![prompt(None)]), &answers[..1], &[("answered", 1.0)]);
    }
}
