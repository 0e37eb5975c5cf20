//! What one request may bring.

use config::MediaConfig;

use super::policy::Refusal;

/// What the media of one request may still take.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    most_media: usize,
    most_bytes: u64,
    media: usize,
    bytes: u64,
}

impl Allowance {
    /// That of a request without media so far.
    pub fn new(config: &MediaConfig) -> Self {
        Self {
            most_media: config.max_per_request,
            most_bytes: config.max_total_bytes,
            media: 0,
            bytes: 0,
        }
    }

    /// One more medium is named. For all of them before the first one is touched.
    ///
    /// # Errors
    /// That is one too many.
    pub fn take_medium(&mut self) -> Result<(), Refusal> {
        if self.media == self.most_media {
            return Err(Refusal::TooMany(self.most_media));
        }
        self.media += 1;
        Ok(())
    }

    /// A medium has turned out to have so many bytes.
    ///
    /// # Errors
    /// That is too much with those before it.
    pub fn take_bytes(&mut self, bytes: u64) -> Result<(), Refusal> {
        let all = self.bytes.saturating_add(bytes);
        if all > self.most_bytes {
            return Err(Refusal::TogetherTooLarge(self.most_bytes));
        }
        self.bytes = all;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn media_are_counted_and_weighed_together() {
        let config = MediaConfig {
            max_per_request: 2,
            max_total_bytes: 10,
            ..MediaConfig::default()
        };
        let mut allowance = Allowance::new(&config);
        assert_eq!([(); 2].map(|()| allowance.take_medium()), [Ok(()), Ok(())]);
        assert_eq!(allowance.take_medium(), Err(Refusal::TooMany(2)));
        assert_eq!(allowance.take_bytes(4), Ok(()));
        assert_eq!(allowance.take_bytes(7), Err(Refusal::TogetherTooLarge(10)));
        assert_eq!(allowance.take_bytes(u64::MAX), Err(Refusal::TogetherTooLarge(10)));
        assert_eq!(allowance.take_bytes(6), Ok(()), "what was refused is not counted");
        let default = MediaConfig::default();
        assert_eq!((default.max_per_request, default.max_total_bytes), (20, 1_048_576_000));
    }
}
