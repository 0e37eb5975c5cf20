//! One line for each request.

use std::io::Write;

use crate::core::record::{Outcome, Record, Slo};

/// Names of the columns.
const COLUMNS: [&str; 15] = [
    "index",
    "intended_s",
    "late_ms",
    "outcome",
    "message",
    "asked_input_tokens",
    "prompt_tokens",
    "cached_tokens",
    "asked_output_tokens",
    "output_tokens",
    "ttft_ms",
    "tpot_ms",
    "worst_gap_ms",
    "e2e_ms",
    "met_slo",
];

/// Writes all requests, in the order of their numbers. What is not known is empty.
pub fn write_csv(to: impl Write, records: &[Record], slo: &Slo) -> Result<(), csv::Error> {
    let mut writer = csv::Writer::from_writer(to);
    writer.write_record(COLUMNS)?;
    let mut sorted: Vec<&Record> = records.iter().collect();
    sorted.sort_by_key(|record| record.index);
    for record in sorted {
        writer.write_record(row(record, slo))?;
    }
    writer.flush()?;
    Ok(())
}

fn row(record: &Record, slo: &Slo) -> [String; 15] {
    let (outcome, message) = match &record.outcome {
        Outcome::Done => ("done".to_owned(), ""),
        Outcome::Failed(failure, words) => (failure.to_string(), words.as_str()),
        Outcome::Aborted => ("aborted".to_owned(), ""),
    };
    let ms = |seconds: Option<f64>| seconds.map_or_else(String::new, |s| format!("{:.3}", s * 1e3));
    let count = |tokens: Option<u32>| tokens.map_or_else(String::new, |tokens| tokens.to_string());
    [
        record.index.to_string(),
        format!("{:.6}", record.intended_s),
        ms(Some(record.late_s)),
        outcome,
        message.to_owned(),
        count(record.asked_input),
        count(record.prompt_tokens),
        count(record.cached_tokens),
        record.asked_output.to_string(),
        record.output_tokens.to_string(),
        ms(record.ttft_s),
        ms(record.tpot_s()),
        ms(record.worst_gap_s()),
        ms(Some(record.e2e_s)),
        record.meets(slo).to_string(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::record::Failure;
    use crate::core::record::tests::{done, failed};

    #[test]
    fn a_line_for_each_request_in_their_order() {
        let mut strange = failed(0, Failure::Status(500));
        strange.outcome = Outcome::Failed(Failure::Status(500), "a, \"b\"\nc".to_owned());
        let slo = Slo {
            ttft_ms: Some(50.0),
            ..Slo::default()
        };
        let mut bytes = Vec::new();
        write_csv(&mut bytes, &[done(1, 100, 20), strange], &slo).expect("memory");
        let text = String::from_utf8(bytes.clone()).expect("UTF-8");
        assert!(text.starts_with("index,intended_s,late_ms,outcome,"), "{text}");
        assert!(
            text.contains("1,1.000000,0.100,done,,100,100,16,11,11,100.000,20.000,20.000,300.000,false"),
            "{text}"
        );
        let rows: Vec<_> = csv::Reader::from_reader(bytes.as_slice())
            .into_records()
            .map(|row| row.expect("a row"))
            .collect();
        assert_eq!((rows.len(), &rows[0][3], &rows[0][4]), (2, "status 500", "a, \"b\"\nc"));
    }
}
