//! What decides: which addresses are known, which are dialled and let go, what a registration needs next. Pure: no clock, no
//! network; time is an argument.

pub mod directory;
pub mod known;
pub mod lease;
