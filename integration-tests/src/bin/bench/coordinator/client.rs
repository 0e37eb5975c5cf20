//! A client that costs little: fixed bytes out over a connection that stays open, and no more read of an answer than is
//! needed to know that it is whole.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use runtime::clock::Clock;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Longest wait for an answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// The bytes of a request of TGI's, on a connection that stays open.
pub(super) fn request(text: &str, max_new_tokens: u32) -> Vec<u8> {
    let body = json!({"inputs": text, "parameters": {"max_new_tokens": max_new_tokens, "details": true}}).to_string();
    format!(
        "POST /generate HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// One open connection.
pub(super) struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Connection {
    pub(super) async fn open(port: u16) -> Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port)).await?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            buffer: Vec::new(),
        })
    }

    /// Sends a request and does not wait for its answer.
    pub(super) async fn send(&mut self, request: &[u8]) -> Result<()> {
        Ok(self.stream.write_all(request).await?)
    }

    /// Sends a request and reads the whole answer, which must be a 200; how long that took.
    pub(super) async fn ask(&mut self, request: &[u8]) -> Result<Duration> {
        let start: Instant = Clock.now();
        self.send(request).await?;
        timeout(ANSWER_WITHIN, self.read())
            .await
            .context("no answer in time")??;
        Ok(start.elapsed())
    }

    /// The body of the next answer.
    pub(super) async fn read(&mut self) -> Result<Vec<u8>> {
        self.buffer.clear();
        let head = loop {
            if let Some(end) = self.buffer.windows(4).position(|window| window == b"\r\n\r\n") {
                break end + 4;
            }
            self.more().await?;
        };
        let text = String::from_utf8_lossy(&self.buffer[..head]).to_ascii_lowercase();
        let length = text.lines().find_map(|line| line.strip_prefix("content-length:"));
        let length: usize = length.context("no length")?.trim().parse()?;
        while self.buffer.len() < head + length {
            self.more().await?;
        }
        let body = self.buffer[head..].to_vec();
        ensure!(
            text.starts_with("http/1.1 200"),
            "{text}{}",
            String::from_utf8_lossy(&body)
        );
        Ok(body)
    }

    async fn more(&mut self) -> Result<()> {
        if self.stream.read_buf(&mut self.buffer).await? == 0 {
            bail!("the connection was closed");
        }
        Ok(())
    }
}
