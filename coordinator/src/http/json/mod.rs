//! Reading request bodies without building a tree: one pass checks the syntax of the whole body, then fields are read
//! from the text on demand.
//!
//! A body can therefore not grow in memory, numbers keep every digit, and an error can show the value as it was sent.
//!
//! * [`scan`]: the syntax check: strict UTF-8, strict JSON, bounded nesting, no lone surrogates.
//! * [`raw`]: a checked value: its kind, its members, its text.
//! * [`fields`]: typed, range-checked access to the members of an object.
//! * [`tree`]: a copy of a value that is handed on as it is.

pub mod fields;
pub mod raw;
pub mod scan;
pub mod tree;
