//! One answer: what a cluster says must equal what one engine says, to the bit.
//!
//! * [`prompts`]: varied prompts of wanted lengths.
//! * [`query`]: a request, as a body of every endpoint and as the parameters of the engine.
//! * [`answer`]: an answer of any endpoint, read strictly, with its numbers as printed.
//! * [`reference`](mod@reference): one engine in the test's own process.
//! * [`shape`]: its JSON.
//! * [`expected`]: where an answer must end, by a search of its whole text.
//! * [`several`]: answers with several choices.
//! * [`judge`]: asks, and holds the answer against both.
//! * [`watched`]: a pair of nodes whose own counters can be read.

pub mod answer;
pub mod expected;
pub mod judge;
pub mod prompts;
pub mod query;
pub mod reference;
pub mod several;
pub mod shape;
pub mod watched;
