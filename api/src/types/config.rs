//! The configuration that a daemon goes by.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A key of the configuration, with its value in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConfigValue {
    /// Its name; of a key of a table with the table's name in front: `filesystem.cache`.
    pub key: String,
    /// The value, with the type that it has in a configuration file.
    pub value: serde_json::Value,
    /// Who said so.
    pub origin: ConfigOrigin,
    /// The file that says so, if one does.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub file: Option<PathBuf>,
}

/// Where a value comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ConfigOrigin {
    /// An option of `serve`.
    Option,
    /// An environment variable.
    Variable,
    /// The configuration file.
    File,
    /// `init` or `join` kept it in the data directory.
    Node,
    /// Nobody said anything.
    Default,
}

impl ConfigOrigin {
    /// For people.
    pub fn word(self) -> &'static str {
        match self {
            Self::Option => "option",
            Self::Variable => "environment variable",
            Self::File => "file",
            Self::Node => "init or join",
            Self::Default => "default",
        }
    }
}
