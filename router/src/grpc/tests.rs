//! The service over a scripted generator, called as tonic calls it.

use std::{sync::Arc, time::Duration};

use futures::StreamExt;
use tonic::{Code, Request, Status};
use trireme_proto::generate::v1::{
    self as proto, generate_request::Prompt, generation_server::Generation,
};

use super::{Addresses, GenerationService};
use crate::http::tests::fake::{Fake, TEXT};

fn service(fake: Fake) -> GenerationService {
    GenerationService::new(Arc::new(fake), Addresses::default(), None)
}

fn text(text: &str) -> proto::GenerateRequest {
    proto::GenerateRequest { prompt: Some(Prompt::Text(text.to_owned())), ..Default::default() }
}

fn messages(messages: &[(&str, &str)]) -> proto::GenerateRequest {
    let message = |(role, content): &(&str, &str)| proto::Message {
        role: (*role).to_owned(),
        content: (*content).to_owned(),
    };
    let messages = proto::Messages { messages: messages.iter().map(message).collect() };
    proto::GenerateRequest { prompt: Some(Prompt::Messages(messages)), ..Default::default() }
}

fn identified(request_id: &str) -> proto::GenerateRequest {
    proto::GenerateRequest { request_id: request_id.to_owned(), ..text("hi") }
}

fn constrained(constraint: proto::parameters::Constraint) -> proto::GenerateRequest {
    let parameters = proto::Parameters { constraint: Some(constraint), ..Default::default() };
    proto::GenerateRequest { parameters: Some(parameters), ..text("hi") }
}

/// What a request is answered with, whole and streamed: its text, or a code and a message.
async fn check(request: proto::GenerateRequest, expected: Result<&str, (Code, &str)>) {
    let service = service(Fake::default());
    let told = |status: Status| (status.code(), status.message().to_owned());
    let expected = expected
        .map(str::to_owned)
        .map_err(|(code, message): (Code, &str)| (code, message.to_owned()));
    let whole = service.generate(Request::new(request.clone())).await;
    let whole = whole.map(|reply| reply.into_inner().text).map_err(told);
    assert_eq!(whole, expected, "{request:?}");
    let streamed = service.generate_stream(Request::new(request.clone())).await;
    assert_eq!(streamed.err().map(told), expected.err(), "{request:?}");
}

#[tokio::test]
async fn what_http_refuses_is_refused() {
    let invalid = |message| Err((Code::InvalidArgument, message));
    check(text("hi"), Ok(TEXT)).await;
    check(messages(&[("user", "hi")]), Ok(TEXT)).await;
    check(messages(&[]), invalid("messages must not be an empty list")).await;
    check(messages(&[("user", "a"), ("", "b")]), invalid("messages[1].role is required")).await;
    check(identified(&"x".repeat(128)), Ok(TEXT)).await;
    let words = "request_id must be 1 to 128 visible ASCII characters";
    let message = format!("{words}; this one has 129 bytes");
    check(identified(&"x".repeat(129)), invalid(&message)).await;
    let message = format!("{words}; this one has 3 bytes");
    check(identified("a\nb"), invalid(&message)).await;
    use proto::parameters::Constraint;
    let message = "json_schema: not valid JSON: EOF while parsing an object at line 1 column 1";
    check(constrained(Constraint::JsonSchema("{".into())), invalid(message)).await;
    let message = "json_schema: a schema is an object, not a number or null";
    check(constrained(Constraint::JsonSchema("3".into())), invalid(message)).await;
    let none = proto::Choices::default();
    check(constrained(Constraint::Choices(none)), invalid("choices: no text matches it")).await;
}

#[tokio::test]
async fn a_deadline_ends_an_answer_and_its_generation() {
    for streamed in [false, true] {
        for prompt in ["hang", "hang at once"] {
            let fake = Fake::default();
            let dropped = fake.dropped.clone();
            let service = service(fake);
            let mut request = Request::new(text(prompt));
            request.set_timeout(Duration::from_millis(30));
            let status = match streamed {
                false => service.generate(request).await.unwrap_err(),
                true => {
                    let events = service.generate_stream(request).await.unwrap().into_inner();
                    let last = events.collect::<Vec<_>>().await.pop();
                    last.unwrap().unwrap_err()
                }
            };
            assert_eq!(status.code(), Code::DeadlineExceeded, "{prompt}, {streamed}: {status}");
            assert_eq!(dropped.0.available_permits(), 1, "{prompt}, {streamed}");
        }
    }
}

#[tokio::test]
async fn a_prompt_is_scored() {
    use proto::score_request::Prompt;
    let service = service(Fake::default());
    let request = |prompt, top_logprobs, start| proto::ScoreRequest {
        prompt,
        top_logprobs,
        start,
        ..Default::default()
    };
    let ids = Some(Prompt::Ids(proto::TokenIds { ids: vec![97, 98, 99] }));
    let reply = service.score(Request::new(request(ids, 1, 2))).await.unwrap().into_inner();
    let found: Vec<_> = reply.tokens.iter().map(|t| (t.id, t.logprob, t.rank)).collect();
    assert_eq!(found, [(97, None, None), (98, None, None), (99, Some(-2.5), Some(3))]);
    assert_eq!(reply.tokens[2].text, "c");
    assert_eq!((reply.tokens[2].top[0].id, reply.tokens[2].top[0].logprob), (200, -0.25));
    let usage = reply.usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (3, 0));
    let status = service.score(Request::new(request(None, 0, 0))).await.unwrap_err();
    assert_eq!(status.message(), "prompt must be one of text and ids; none is given");
}

#[tokio::test]
async fn a_scoring_that_takes_too_long_is_cut_and_cancelled() {
    let fake = Fake::default();
    let dropped = fake.dropped.clone();
    let service = service(fake);
    let prompt = Some(proto::score_request::Prompt::Text("hang".into()));
    let mut request = Request::new(proto::ScoreRequest { prompt, ..Default::default() });
    request.set_timeout(Duration::from_millis(30));
    let status = service.score(request).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    assert_eq!(dropped.0.available_permits(), 1);
}

/// Programs read the reason and the field.
#[tokio::test]
async fn errors_have_details() {
    use tonic_types::StatusExt;
    let service = service(Fake::default());
    let refused = |text: &'static str| {
        let service = service.clone();
        async move { service.generate(Request::new(self::text(text))).await.unwrap_err() }
    };
    for (prompt, reason, field) in [
        ("too hot", "INVALID_VALUE", Some("max_new_tokens")),
        ("full", "QUEUE_FULL", None),
        ("not ready", "NOT_READY", None),
        ("broken", "INTERNAL_ERROR", None),
    ] {
        let status = refused(prompt).await;
        let info = status.get_details_error_info().expect("ErrorInfo");
        assert_eq!((info.reason.as_str(), info.domain.as_str()), (reason, "trireme"));
        let violations = status.get_details_bad_request().map(|bad| bad.field_violations);
        let found = violations.and_then(|violations| Some(violations.first()?.field.clone()));
        assert_eq!(found.as_deref(), field, "{prompt}");
    }
    let retry = refused("full").await.get_details_retry_info().and_then(|info| info.retry_delay);
    assert_eq!(retry, Some(Duration::from_secs(3)));
}

/// The shards' API is no business of clients.
#[test]
fn reflection_describes_the_public_api_alone() {
    let described = String::from_utf8_lossy(trireme_proto::GENERATE_DESCRIPTOR_SET);
    assert!(described.contains("trireme.generate.v1"));
    assert!(!described.contains("shard"), "{described}");
}
