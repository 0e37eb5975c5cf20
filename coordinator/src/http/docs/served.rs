//! Schemas that depend on what is served here: names of models, adapters and tokens. The other schemas refer to them.

use std::collections::BTreeSet;

use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::openapi::{Ref, RefOr, Schema};

use crate::http::state::HttpState;

/// A name that a request can give as its model.
pub const MODEL_NAME: &str = "ModelName";
/// A name under which `/v1/models` has something.
pub const MODEL_ID: &str = "ModelId";
/// A name that a request can give as its adapter.
pub const ADAPTER_NAME: &str = "AdapterName";
/// A token of the model.
pub const TOKEN_ID: &str = "TokenId";
/// A seed.
pub const SEED: &str = "Seed";

/// What the document says of one server.
#[derive(Clone, Debug)]
pub struct Served {
    /// Names of the model and its aliases and adapters.
    pub models: BTreeSet<String>,
    /// Names of its adapters.
    pub adapters: Vec<String>,
    /// Any other name means the model, too.
    pub any_model_name: bool,
    /// Token ids are below this.
    pub vocab_size: usize,
    /// 1, or 0 where seed 0 is allowed.
    pub least_seed: u64,
}

impl Served {
    /// What `state` serves.
    pub fn of(state: &HttpState) -> Self {
        Self {
            models: state.model.names().map(str::to_owned).collect::<BTreeSet<_>>(),
            adapters: state.model.adapters.clone(),
            any_model_name: state.front.any_model_name,
            vocab_size: state.model.text.vocab_size,
            least_seed: state.least_seed(),
        }
    }

    /// The schemas, by name.
    pub fn schemas(&self) -> [(&'static str, Schema); 5] {
        let text = || ObjectBuilder::new().schema_type(Type::String).min_length(Some(1));
        let models = || self.models.iter().map(String::as_str);
        let number = || ObjectBuilder::new().schema_type(Type::Integer);
        let name = text().description(Some("Name of the model, one of its aliases, or of an adapter."));
        let name = if self.any_model_name {
            name.examples(models().take(1))
        } else {
            name.enum_values(Some(models()))
        };
        let id = text()
            .description(Some("Name of the model, one of its aliases, or of an adapter."))
            .enum_values(Some(models()));
        let none = std::iter::once("None");
        let adapter = text()
            .description(Some("Name of an adapter; \"None\" is no adapter."))
            .enum_values(Some(self.adapters.iter().map(String::as_str).chain(none)));
        let token = number()
            .description(Some("Id of a token of the model."))
            .minimum(Some(0))
            .maximum(Some(self.vocab_size.saturating_sub(1)));
        let seed = number()
            .description(Some("Seed of the draws, up to 18446744073709551615."))
            .minimum(Some(self.least_seed as usize))
            .maximum(Some(usize::MAX));
        [
            (MODEL_NAME, name.into()),
            (MODEL_ID, id.into()),
            (ADAPTER_NAME, adapter.into()),
            (TOKEN_ID, token.into()),
            (SEED, seed.into()),
        ]
    }
}

/// Refers to one of the schemas.
pub fn reference(name: &str) -> RefOr<Schema> {
    RefOr::Ref(Ref::from_schema_name(name))
}
