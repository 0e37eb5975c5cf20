// Asks the coordinator. The token is kept for this tab alone, and sent in a header: no cookie, no address ever has it.

const KEPT = "baton-admin-token";
/** Longest wait for an answer, in milliseconds. */
const PATIENCE = 8_000;

/** Why there is no answer: `refused` (the token), `away` (nobody answers), or `wrong` (the coordinator says so). */
export class Failure extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

export const token = {
  get: () => sessionStorage.getItem(KEPT),
  keep: (value) => sessionStorage.setItem(KEPT, value),
  forget: () => sessionStorage.removeItem(KEPT),
};

/** What the coordinator says about `path`. */
export async function ask(path) {
  let answer;
  try {
    answer = await fetch(path, {
      headers: { Authorization: `Bearer ${token.get()}` },
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal: AbortSignal.timeout(PATIENCE),
    });
  } catch {
    throw new Failure("away", "the coordinator does not answer");
  }
  let said;
  try {
    said = await answer.json();
  } catch {
    throw new Failure("away", `something else answers in the coordinator's place (${answer.status})`);
  }
  if (answer.status === 401) throw new Failure("refused", "this token is not one of admin.tokens");
  if (!answer.ok) throw new Failure("wrong", String(said.error ?? answer.status));
  return said;
}
