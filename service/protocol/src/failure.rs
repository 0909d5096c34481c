//! Failure codes: the kind of failure that an answer reports, for programs.

use serde::{Deserialize, Serialize};

/// What kind of failure it is. The command line shows it under the same name (docs/observability.md has the list).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureCode {
    /// A value in the command is wrong.
    Usage,
    /// What is named does not exist.
    NotFound,
    /// The name is taken.
    Exists,
    /// What is named is mounted, or somebody uses it.
    InUse,
    /// The host lacks something, or refuses it.
    Host,
    /// A file or directory cannot be used.
    File,
    /// What is stored is not as it should be.
    Damaged,
    /// There is no room.
    NoSpace,
    /// None of the others, and of another build one that is not known here.
    #[default]
    #[serde(other)]
    Failed,
}

#[cfg(test)]
mod tests {
    use crate::{Answer, FailureCode};

    #[test]
    fn an_answer_says_what_kind_of_failure_it_is() {
        let failed = |text: &str| serde_json::from_str::<Answer>(text).expect("an answer");
        let answer = Answer::Failed { code: FailureCode::InUse, message: "m".into(), remedy: None };
        let text = serde_json::to_string(&answer).expect("text");
        assert_eq!(text, r#"{"answer":"failed","code":"in-use","message":"m"}"#);
        assert_eq!(failed(&text), answer);
        let unknown = Answer::Failed { code: FailureCode::Failed, message: "m".into(), remedy: None };
        assert_eq!(failed(r#"{"answer":"failed","message":"m"}"#), unknown);
        let remedied = Answer::Failed { code: FailureCode::Failed, message: "m".into(), remedy: Some("r".into()) };
        assert_eq!(failed(r#"{"answer":"failed","message":"m","remedy":"r"}"#), remedied);
        assert_eq!(failed(r#"{"answer":"failed","code":"of-tomorrow","message":"m"}"#), unknown);
    }
}
