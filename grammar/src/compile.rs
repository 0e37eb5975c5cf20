//! From a grammar's text to something that says what may follow.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::{Matcher, ParserFactory};
use model_files::{ModelFiles, TextModel};
use protocol::sampling::Grammar;
use serde_json::{Value, json};
use toktrie::InferenceCapabilities;

use crate::error::{GrammarError, brief};
use crate::gbnf;
use crate::state::GrammarState;
use crate::vocabulary::environment;

/// Compiled grammars that are kept.
const KEPT: usize = 32;
/// Compilers recurse with the nesting of a grammar; they get a stack of this many bytes. What is not used costs nothing.
const STACK_BYTES: usize = 64 << 20;
/// Deepest nesting of brackets in a grammar that is not JSON (whose reader has a bound of its own).
const MAX_NESTING: usize = 200;
/// Symbols of a compiled grammar.
const MAX_SYMBOLS: usize = 200_000;
/// States of a lexer, about 2 KB each; they are made as texts reach them.
const MAX_LEXER_STATES: usize = 30_000;
/// Where JSON may have white space there may be at most this much of it: models tend to get lost in it.
const WHITE_SPACE: &str = r"[\x20\x0A\x0D\x09]{1,32}";

/// Where the vocabulary comes from. It is read when the first grammar comes.
#[derive(Debug)]
pub enum Vocabulary {
    /// The text side of a model that is open.
    Text(Box<TextModel>),
    /// A model's file or directory.
    Path(PathBuf),
}

/// Compiles grammars for one vocabulary and keeps those that were used last. Cheap to clone.
#[derive(Clone)]
pub struct Grammars(Arc<Inner>);

struct Inner {
    vocabulary: Vocabulary,
    factory: OnceLock<Result<ParserFactory, GrammarError>>,
    /// The most recently used one last.
    kept: Mutex<Vec<(Arc<Grammar>, Matcher)>>,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars").field("kept", &self.kept().len()).finish()
    }
}

impl Grammars {
    /// Nothing is read or computed before the first grammar.
    pub fn new(vocabulary: Vocabulary) -> Self {
        Self(Arc::new(Inner {
            vocabulary,
            factory: OnceLock::new(),
            kept: Mutex::new(Vec::new()),
        }))
    }

    /// Compiles a grammar, if it is not among those that are kept. Takes from microseconds to some tenths of a second: not
    /// for threads that others wait for.
    ///
    /// # Errors
    /// [`GrammarError`] says what is wrong with the grammar.
    pub fn prepare(&self, grammar: &Grammar) -> Result<(), GrammarError> {
        self.start(grammar).map(|_| ())
    }

    /// The state of an empty output. Compiles the grammar as [`Grammars::prepare`] does.
    ///
    /// # Errors
    /// As [`Grammars::prepare`].
    pub fn start(&self, grammar: &Grammar) -> Result<GrammarState, GrammarError> {
        let (grammar, matcher) = self.matcher(grammar)?;
        Ok(GrammarState::new(self.clone(), grammar, matcher))
    }

    /// A matcher at the beginning of the grammar.
    pub(crate) fn matcher(&self, grammar: &Grammar) -> Result<(Arc<Grammar>, Matcher), GrammarError> {
        if let Some(found) = self.find(grammar) {
            return Ok(found);
        }
        let factory = self.factory()?;
        // The compiler's stack is a thread's own.
        let compiled = thread::scope(|scope| {
            let compile = move || compile(factory, grammar);
            match thread::Builder::new()
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, compile)
            {
                Ok(thread) => thread
                    .join()
                    .unwrap_or_else(|_| Err(GrammarError::Invalid("the compiler gave up".to_owned()))),
                Err(error) => Err(GrammarError::TooComplex(format!("no thread to compile it: {error}"))),
            }
        })?;
        let grammar = Arc::new(grammar.clone());
        let mut kept = self.kept();
        if kept.len() >= KEPT {
            kept.remove(0);
        }
        kept.push((Arc::clone(&grammar), compiled.clone()));
        Ok((grammar, compiled))
    }

    fn find(&self, grammar: &Grammar) -> Option<(Arc<Grammar>, Matcher)> {
        let mut kept = self.kept();
        let at = kept.iter().position(|(known, _)| **known == *grammar)?;
        let found = kept.remove(at);
        let result = (Arc::clone(&found.0), found.1.clone());
        kept.push(found);
        Some(result)
    }

    /// Compiled grammars share what their lexers have found out; one that ran into a bound is not to be shared any longer.
    pub(crate) fn forget(&self, grammar: &Grammar) {
        self.kept().retain(|(known, _)| **known != *grammar);
    }

    fn kept(&self) -> MutexGuard<'_, Vec<(Arc<Grammar>, Matcher)>> {
        // No code that can panic runs under the lock.
        self.0.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn factory(&self) -> Result<&ParserFactory, GrammarError> {
        let built = self.0.factory.get_or_init(|| match &self.0.vocabulary {
            Vocabulary::Text(text) => factory(text),
            Vocabulary::Path(path) => {
                let text = ModelFiles::open(path).and_then(|files| files.text());
                factory(&text.map_err(|error| GrammarError::Vocabulary(error.to_string()))?)
            }
        });
        built.as_ref().map_err(Clone::clone)
    }
}

fn factory(text: &TextModel) -> Result<ParserFactory, GrammarError> {
    let environment = environment(text)?;
    let slices = SlicedBiasComputer::general_slices();
    let mut factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)
        .map_err(|error| GrammarError::Vocabulary(brief(&error.to_string())))?;
    factory.quiet();
    let limits = factory.limits_mut();
    limits.max_grammar_size = MAX_SYMBOLS;
    limits.max_lexer_states = MAX_LEXER_STATES;
    limits.verbose_errors = false;
    Ok(factory)
}

fn compile(factory: &ParserFactory, grammar: &Grammar) -> Result<Matcher, GrammarError> {
    let parser = factory.create_parser(describe(grammar)?);
    let mut matcher = Matcher::new(parser);
    let problem = matcher.get_error();
    if let Some(problem) = problem {
        return Err(GrammarError::Invalid(brief(&problem)));
    }
    // A grammar without any text has no first token.
    matcher
        .clone()
        .compute_mask_or_eos()
        .map_err(|error| GrammarError::Invalid(format!("no text fits it: {}", brief(&error.to_string()))))?;
    for warning in matcher.grammar_warnings() {
        tracing::debug!(warning = %brief(&warning), "a grammar's compiler warns");
    }
    Ok(matcher)
}

fn describe(grammar: &Grammar) -> Result<TopLevelGrammar, GrammarError> {
    match grammar {
        Grammar::JsonSchema(schema) => {
            let mut schema: Value = serde_json::from_str(schema)
                .map_err(|error| GrammarError::Invalid(format!("the schema is no JSON: {error}")))?;
            match &mut schema {
                Value::Object(object) => {
                    object
                        .entry("x-guidance")
                        .or_insert_with(|| json!({ "whitespace_pattern": WHITE_SPACE }));
                }
                Value::Bool(_) => {}
                Value::Null | Value::Number(_) | Value::String(_) | Value::Array(_) => {
                    let problem = "a JSON schema must be an object, true or false";
                    return Err(GrammarError::Invalid(problem.to_owned()));
                }
            }
            Ok(TopLevelGrammar::from_json_schema(schema))
        }
        Grammar::Regex(pattern) => {
            check_nesting(pattern)?;
            Ok(TopLevelGrammar::from_regex(pattern))
        }
        Grammar::Lark(text) => {
            check_nesting(text)?;
            let text = if gbnf::is_gbnf(text) {
                gbnf::to_lark(text).map_err(GrammarError::Invalid)?
            } else {
                text.clone()
            };
            Ok(TopLevelGrammar::from_lark(text))
        }
        Grammar::Choice(choices) => {
            if choices.is_empty() || choices.iter().any(String::is_empty) {
                let problem = "the choices must be non-empty strings, at least one of them";
                return Err(GrammarError::Invalid(problem.to_owned()));
            }
            let literals: Vec<String> = choices
                .iter()
                .map(|choice| Value::from(choice.as_str()).to_string())
                .collect();
            Ok(TopLevelGrammar::from_lark(format!("start: {}\n", literals.join(" | "))))
        }
    }
}

fn check_nesting(text: &str) -> Result<(), GrammarError> {
    let mut depth = 0_usize;
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_NESTING {
            let problem = format!("brackets are nested more than {MAX_NESTING} deep");
            return Err(GrammarError::Invalid(problem));
        }
    }
    Ok(())
}
