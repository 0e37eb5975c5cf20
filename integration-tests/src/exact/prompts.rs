//! Varied prompts: prose, code, lists, numbers, other scripts, cut to wanted lengths.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use model_files::TextTokenizer;

const PASSAGES: &[&str] = &[
    "The harbour was quiet before dawn, and the only sound was the slap of ropes against the masts. A boy with a lantern \
     walked along the pier, counting the boats aloud, because his father had told him that a number said aloud is a \
     number kept. When he reached the end he turned round and counted them again, and the sum was different.",
    "Write a short letter to a neighbour whose dog has dug up your tulips. Be polite, be firm, and offer to help with a \
     fence. Mention that the tulips were a gift from your grandmother, who planted the first of them in 1953.",
    "fn main() {\n    let mut total = 0u64;\n    for (i, line) in std::io::stdin().lines().enumerate() {\n        let \
     line = line.expect(\"input\");\n        total += line.trim().parse::<u64>().unwrap_or(0) * (i as u64 + 1);\n    \
     }\n    println!(\"{total}\");\n}\n",
    "Question: A train leaves the station at 9:40 and travels at 84 km/h. A second train leaves the same station at \
     10:15 and travels at 112 km/h in the same direction. At what time does the second train catch up?\nAnswer:",
    "Die alte Mühle am Fluss stand seit Jahren leer. Manchmal, wenn der Wind aus Süden kam, drehte sich das Rad ein \
     Stück weiter, als wolle es sich erinnern, wofür es gebaut worden war. Übermütige Kinder warfen Kieselsteine hinein.",
    "1. Preheat the oven to 220 °C.\n2. Mix 300 g of flour with 6 g of salt and 2 g of yeast.\n3. Add 220 ml of water \
     and fold, do not knead.\n4. Wait. The dough knows what to do.\n5. Bake for 35 minutes, until it sounds hollow.\n",
    "La bibliothèque fermait à dix-huit heures, mais le vieux gardien laissait toujours une lampe allumée près de la \
     fenêtre. « Pour les livres », disait-il, « ils n'aiment pas l'obscurité complète. » Personne n'osait le contredire.",
    "{\"id\": 4711, \"name\": \"pump-17\", \"readings\": [0.125, 0.25, 0.5, 1.0, 2.0], \"ok\": true, \"note\": null, \
     \"tags\": [\"north\", \"spare\", \"rev-c\"], \"limits\": {\"low\": -40, \"high\": 85.5}}",
    "北方的冬天很长。每天清晨，老人都会把门前的雪扫干净，然后坐在炉子旁边等他的孙子放学。水在壶里慢慢地响，窗户上结满了白色的花。\
     他说，春天总是会来的，只是它走得比较慢。",
    "SELECT c.name, COUNT(o.id) AS orders, SUM(o.total) AS revenue FROM customers c LEFT JOIN orders o ON o.customer_id \
     = c.id WHERE o.created_at >= '2024-01-01' GROUP BY c.name HAVING SUM(o.total) > 1000 ORDER BY revenue DESC;",
    "User: My parrot has learned the sound of the microwave and now I eat at odd hours. What should I do?\nAssistant: \
     Have you tried teaching it the sound of the dishwasher?\nUser: It already does the doorbell. 🦜🔔\nAssistant:",
    "def primes(limit):\n    sieve = bytearray([1]) * (limit + 1)\n    sieve[0:2] = b'\\x00\\x00'\n    for n in \
     range(2, int(limit ** 0.5) + 1):\n        if sieve[n]:\n            sieve[n * n :: n] = bytes(len(range(n * n, \
     limit + 1, n)))\n    return [n for n, prime in enumerate(sieve) if prime]\n",
    "Chapter Seven, in which the cartographer discovers that the island is moving. She measured the distance to the \
     lighthouse three times, at noon, at dusk and at midnight, and each time the chain was short by exactly one link.",
    "Осенью мы собирали яблоки и складывали их в ящики с соломой. Дедушка говорил, что яблоко надо держать как яйцо: \
     не сжимать, но и не отпускать. Пахло дымом, мокрой землёй и чем-то сладким, чему нет названия.",
    "3.14159265358979323846 2.71828182845904523536 1.41421356237309504880 1.61803398874989484820 0.57721566490153286060 \
     6.02214076e23 1.602176634e-19 299792458 9.80665 273.15 1013.25 6.62607015e-34 8.314462618",
    "Translate into Spanish: \"The meeting has been moved to Thursday at half past three, in the room behind the \
     kitchen. Please bring your own chair.\"\nTraducción:",
    "<html>\n  <head><title>Weather</title></head>\n  <body>\n    <h1>Today</h1>\n    <p class=\"warm\">Sun, 24&deg;C, \
     wind <b>SW</b> 3&ndash;4.</p>\n    <ul><li>UV 6</li><li>Pollen: high</li></ul>\n  </body>\n</html>\n",
    "The difference between a habit and a ritual is attention. You brush your teeth out of habit; you wind your \
     grandfather's watch as a ritual, although both take two minutes and both keep something from falling apart.",
    "図書館の裏にある小さな庭には、いつも猫が三匹いました。一番大きいのは司書さんの猫で、名前は「目録」といいます。雨の日には、\
     窓から本棚を見ていました。",
    "git log --oneline --since='2 weeks ago' -- src/core | sort | uniq -c | awk '{ if ($1 > 1) print $2, $3 }' > \
     /tmp/report.txt && wc -l < /tmp/report.txt || echo \"nothing to report: $?\"",
];

/// `count` lengths from 1 to `longest` tokens: more short ones than long ones, in mixed order.
pub fn mixed_lengths(count: usize, longest: usize) -> Vec<usize> {
    let length = |i: usize| {
        let rank = (i * 37 + 11) % count.max(1);
        let share = rank as f64 / (count.max(2) - 1) as f64;
        1 + ((longest - 1) as f64 * share.powf(2.2)).round() as usize
    };
    (0..count).map(length).collect()
}

/// The beginning of `text`, repeated as needed, that is as long as possible with at most `tokens` tokens.
fn cut(tokenizer: &TextTokenizer, text: &str, tokens: usize) -> Result<String> {
    let mut long = text.to_owned();
    while tokenizer.encode(&long)?.len() <= tokens {
        long.push(' ');
        long.push_str(text);
    }
    let borders: Vec<usize> = long
        .char_indices()
        .map(|(at, _)| at)
        .skip(1)
        .chain([long.len()])
        .collect();
    // Almost monotone: a longer text may have one token less. A neighbour of the longest one is as good.
    let (mut low, mut high) = (0, borders.len() - 1);
    while low < high {
        let middle = (low + high).div_ceil(2);
        if tokenizer.encode(&long[..borders[middle]])?.len() <= tokens {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    Ok(long[..borders[low]].to_owned())
}

/// Different prompts of about the given lengths, in tokens: never more, seldom one less.
///
/// # Errors
/// The tokenizer gives up, or a passage has no further beginning of such a length.
pub fn prompts(tokenizer: &TextTokenizer, lengths: &[usize]) -> Result<Vec<String>> {
    let mut seen = BTreeSet::new();
    let mut out = Vec::with_capacity(lengths.len());
    for (i, &tokens) in lengths.iter().enumerate() {
        let passage = PASSAGES[i % PASSAGES.len()];
        let words = passage.char_indices().filter(|(_, c)| *c == ' ').map(|(at, _)| at + 1);
        let starts: Vec<usize> = [0].into_iter().chain(words).collect();
        let first = (i / PASSAGES.len()) * 3;
        let mut fresh = None;
        for skip in 0..starts.len() {
            let start = starts[(first + skip) % starts.len()];
            let prompt = cut(tokenizer, &passage[start..], tokens)?;
            if !prompt.is_empty() && seen.insert(prompt.clone()) {
                fresh = Some(prompt);
                break;
            }
        }
        out.push(fresh.with_context(|| format!("no new prompt of {tokens} tokens in passage {}", i % PASSAGES.len()))?);
    }
    Ok(out)
}
