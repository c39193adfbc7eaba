//! Who said what.

use trireme_proto::generate::v1::Message;

pub struct Conversation {
    system: Option<String>,
    messages: Vec<Message>,
}

fn message(role: &str, content: String) -> Message {
    Message { role: role.to_owned(), content }
}

impl Conversation {
    pub fn new(system: Option<String>) -> Self {
        let mut conversation = Self { system, messages: Vec::new() };
        conversation.reset();
        conversation
    }

    pub fn reset(&mut self) {
        self.messages = self.system.iter().map(|text| message("system", text.clone())).collect();
    }

    /// Templates take a system message at the start only, so a new one starts anew.
    pub fn set_system(&mut self, system: Option<String>) {
        self.system = system;
        self.reset();
    }

    pub fn ask(&mut self, text: String) {
        self.messages.push(message("user", text));
    }

    pub fn answer(&mut self, text: String) {
        self.messages.push(message("assistant", text));
    }

    /// Forgets a question that got no answer.
    pub fn take_back(&mut self) {
        if self.messages.last().is_some_and(|last| last.role == "user") {
            self.messages.pop();
        }
    }

    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// As the chat API takes it.
    pub fn json(&self) -> String {
        let message = |m: &Message| serde_json::json!({"role": m.role, "content": m.content});
        let messages: Vec<_> = self.messages.iter().map(message).collect();
        format!("{:#}\n", serde_json::Value::Array(messages))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_kept_in_order() {
        let check = |conversation: &Conversation, want: &str| {
            let said: Vec<_> = conversation
                .messages()
                .iter()
                .map(|m| format!("{}:{}", &m.role[..1], m.content))
                .collect();
            assert_eq!(said.join(" "), want);
        };
        let mut conversation = Conversation::new(Some("brief".to_owned()));
        check(&conversation, "s:brief");
        conversation.ask("1".to_owned());
        conversation.answer("2".to_owned());
        conversation.ask("3".to_owned());
        check(&conversation, "s:brief u:1 a:2 u:3");
        conversation.take_back();
        conversation.take_back();
        check(&conversation, "s:brief u:1 a:2");
        let saved: serde_json::Value = serde_json::from_str(&conversation.json()).unwrap();
        assert_eq!(saved[2]["role"], "assistant");
        conversation.reset();
        check(&conversation, "s:brief");
        conversation.set_system(None);
        check(&conversation, "");
    }
}
