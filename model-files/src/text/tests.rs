//! Tests of the text side.
