use super::*;

fn limits() -> Limits {
    Limits { max_model_len: 100, vocab_size: 50, token_chars: 32, eos_token_ids: vec![2, 7] }
}

/// The outcome in words: the error's text, or the field that `show` picks.
fn check(change: impl FnOnce(&mut Parameters), expect: Result<&str, &str>, show: &str) {
    let mut given = Parameters::default();
    change(&mut given);
    let outcome = parameters(given, &limits(), 99);
    match (outcome, expect) {
        (Ok(valid), Ok(expect)) => {
            let text = format!("{valid:?}");
            let wanted = format!("{show}: {expect}");
            assert!(text.contains(&wanted), "{wanted} not in {text}");
        }
        (Err(error), Err(expect)) => assert_eq!(error.to_string(), expect),
        (outcome, expect) => panic!("{outcome:?}, expected {expect:?}"),
    }
}

#[test]
fn bounds_of_sampling() {
    check(|p| p.temperature = None, Ok("0.0"), "temperature");
    check(|p| p.temperature = Some(100.0), Ok("100.0"), "temperature");
    for (bad, text) in [(f32::NAN, "NaN"), (-0.1, "-0.1"), (100.5, "100.5"), (f32::INFINITY, "inf")]
    {
        let message = format!("temperature must be from 0 to 100, not {text}");
        check(|p| p.temperature = Some(bad), Err(&message), "");
    }
    check(|p| p.top_p = Some(1.0), Ok("1.0"), "top_p");
    check(|p| p.top_p = Some(0.0), Err("top_p must be over 0 and at most 1, not 0"), "");
    check(|p| p.top_p = Some(1.01), Err("top_p must be over 0 and at most 1, not 1.01"), "");
    check(|p| p.typical_p = Some(0.2), Ok("0.2"), "typical_p");
    check(|p| p.typical_p = Some(0.0), Err("typical_p must be over 0 and at most 1, not 0"), "");
    check(|p| p.top_k = Some(1000), Ok("50"), "top_k");
    check(|p| p.min_p = Some(1.0), Ok("1.0"), "min_p");
    check(|p| p.min_p = Some(-0.5), Err("min_p must be from 0 to 1, not -0.5"), "");
    check(|p| p.repetition_penalty = Some(0.01), Ok("0.01"), "repetition_penalty");
    let message = "repetition_penalty must be from 0.01 to 100, not 0";
    check(|p| p.repetition_penalty = Some(0.0), Err(message), "");
    let message = "repetition_penalty must be from 0.01 to 100, not 0.001";
    check(|p| p.repetition_penalty = Some(1e-3), Err(message), "");
    let message = "frequency_penalty must be from -2 to 2, not 2.5";
    check(|p| p.frequency_penalty = Some(2.5), Err(message), "");
    let message = "presence_penalty must be from -2 to 2, not -3";
    check(|p| p.presence_penalty = Some(-3.0), Err(message), "");
    check(|p| p.top_logprobs = 3, Ok("true"), "logprobs");
    let message = "top_logprobs must be from 0 to 20, not 21";
    check(|p| p.top_logprobs = 21, Err(message), "");
    check(|p| p.seed = Some(5), Ok("5"), "seed");
    check(|p| p.seed = None, Ok("99"), "seed");
}

#[test]
fn bounds_of_ids_and_stops() {
    let message = "logit_bias holds id 50; the vocabulary has 50 ids";
    check(|p| p.logit_bias = [(50, 1.0)].into(), Err(message), "");
    let message = "logit_bias must be from -100 to 100, not 101";
    check(|p| p.logit_bias = [(4, 101.0)].into(), Err(message), "");
    check(|p| p.stop = vec![String::new()], Err("stop must not hold an empty string"), "");
    let message = "stop holds at most 16 strings, not 17";
    check(|p| p.stop = vec!["a".to_owned(); 17], Err(message), "");
    let message = "a string of stop may have 1024 bytes, not 1025";
    check(|p| p.stop = vec!["a".repeat(1025)], Err(message), "");
    let message = "stop_token_ids holds id 51; the vocabulary has 50 ids";
    check(|p| p.stop_token_ids = vec![51], Err(message), "");
    check(|p| p.stop_token_ids = vec![7, 3], Ok("[2, 3, 7]"), "stop_token_ids");
    let ignoring = |p: &mut Parameters| {
        p.stop_token_ids = vec![7];
        p.ignore_eos = true;
    };
    check(ignoring, Ok("[7]"), "stop_token_ids");
}

#[test]
fn bounds_of_length() {
    check(|p| p.max_new_tokens = Some(0), Err("max_tokens must be at least 1, not 0"), "");
    let scoring = |top_logprobs| Some(PromptScoring { top_logprobs, start: 0 });
    let scored = |p: &mut Parameters| {
        p.max_new_tokens = Some(0);
        p.prompt_scoring = scoring(20);
    };
    check(scored, Ok("Some(0)"), "max_new_tokens");
    let message = "prompt_logprobs must be from 0 to 20, not 21";
    check(|p| p.prompt_scoring = scoring(21), Err(message), "");
    check(|p| p.truncate = Some(0), Err("truncate must be at least 1, not 0"), "");
    let both = |p: &mut Parameters| {
        p.max_new_tokens = Some(3);
        p.min_new_tokens = 4;
    };
    check(both, Err("min_tokens 4 is over max_tokens 3"), "");
    check(|p| p.min_new_tokens = 101, Err("min_tokens must be from 0 to 100, not 101"), "");
    check(|p| p.priority = 1001, Err("priority must be from -1000 to 1000, not 1001"), "");
}

/// Prompt length, asked length, `truncate` → prompt length and room, or the error.
#[test]
fn fits_the_answer_into_the_room_left() {
    for (prompt, max, truncate, expect) in [
        (10, None, None, Ok((10, 90))),
        (10, Some(5), None, Ok((10, 5))),
        (99, Some(1), None, Ok((99, 1))),
        (99, Some(500), None, Ok((99, 1))),
        (150, Some(500), Some(40), Ok((40, 60))),
        (0, None, None, Err("prompt must have at least 1 token, not 0")),
        (
            100,
            Some(1),
            None,
            Err("prompt has 100 tokens; max-model-len 100 must leave room for an answer"),
        ),
    ] {
        let given = Parameters { max_new_tokens: max, truncate, ..Default::default() };
        let valid = parameters(given, &limits(), 1).unwrap();
        let outcome = fit("r".to_owned(), vec![1; prompt], valid, &limits());
        let outcome = outcome.map(|request| (request.prompt_ids.len(), request.max_new_tokens));
        assert_eq!(outcome.map_err(|error| error.to_string()), expect.map_err(str::to_owned));
    }
    // A prompt that is only scored needs no room.
    let scored = Parameters {
        max_new_tokens: Some(0),
        prompt_scoring: Some(PromptScoring::default()),
        ..Default::default()
    };
    let scored = parameters(scored, &limits(), 1).unwrap();
    let request = fit("r".to_owned(), vec![1; 100], scored.clone(), &limits()).unwrap();
    assert_eq!((request.prompt_ids.len(), request.max_new_tokens), (100, 0));
    assert!(fit("r".to_owned(), vec![1; 101], scored, &limits()).is_err());
    let valid = parameters(Parameters::default(), &limits(), 1).unwrap();
    let error = fit("r".to_owned(), vec![1, 50], valid, &limits()).unwrap_err();
    assert_eq!(error.to_string(), "prompt holds id 50; the vocabulary has 50 ids");
}

#[test]
fn ids_to_decode_are_bounded_and_known() {
    assert_eq!(check_decode(&[49; 400], 100, 50).map_err(|error| error.to_string()), Ok(()));
    let error = check_decode(&[1; 401], 100, 50).unwrap_err().to_string();
    assert_eq!(error, "tokens holds at most 400 ids, not 401");
    let error = check_decode(&[1, 50], 100, 50).unwrap_err().to_string();
    assert_eq!(error, "tokens holds id 50; the vocabulary has 50 ids");
}

#[test]
fn text_guard_counts_characters_not_bytes() {
    let check = |chars: usize, truncates, expect: Option<&str>| {
        let outcome = check_text(&"é".repeat(chars), truncates, &limits());
        let message = outcome.err().map(|error| error.to_string());
        assert_eq!(message.as_deref(), expect, "{chars}, {truncates}");
    };
    check(3200, false, None);
    let message = "prompt has 3201 characters; at most 3200 can fit in max-model-len 100 tokens";
    check(3201, false, Some(message));
    check(12800, true, None);
    let message = "prompt has 12801 characters; at most 12800 may be truncated to \
                   max-model-len 100 tokens";
    check(12801, true, Some(message));
}

#[test]
fn truncation_keeps_the_end() {
    let given = Parameters { truncate: Some(2), ..Default::default() };
    let valid = parameters(given, &limits(), 1).unwrap();
    let request = fit("r".to_owned(), vec![1, 2, 3, 4], valid, &limits()).unwrap();
    assert_eq!(&request.prompt_ids[..], &[3, 4]);
}
