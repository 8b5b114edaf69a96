-- What the flywheel needs of the runtime: policies that may be asked for by id, aliases that are
-- switched with a record of who and why, holds on practice runs, and versioned views to read.

CREATE TABLE runtime.policies (
    tenant_id     text NOT NULL REFERENCES runtime.tenants,
    id            text NOT NULL,
    policy        jsonb NOT NULL,
    registered_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, id)
);

CREATE TABLE runtime.alias_changes (
    tenant_id text NOT NULL REFERENCES runtime.tenants,
    id        bigint GENERATED ALWAYS AS IDENTITY,
    domain    text NOT NULL,
    alias     text NOT NULL,
    before    jsonb,
    after     jsonb,
    changed_by text NOT NULL,
    reason    text NOT NULL,
    repinned  integer NOT NULL DEFAULT 0,
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant_id, id)
);
CREATE TRIGGER alias_changes_append_only BEFORE UPDATE OR DELETE ON runtime.alias_changes
    FOR EACH ROW EXECUTE FUNCTION runtime.refuse_change();

-- A hold keeps runners from claiming the runs of some kinds until it is lifted or expires.
CREATE TABLE runtime.holds (
    name   text PRIMARY KEY,
    kinds  text[] NOT NULL,
    reason text NOT NULL,
    until  timestamptz NOT NULL
);

CREATE INDEX events_feedback ON runtime.events (tenant_id, at) WHERE body ->> 'type' = 'feedback';

-- Register a policy (again is no error: policies are immutable).
CREATE FUNCTION runtime.register_policy_v1(p_tenant text, p_policy jsonb) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO runtime.policies (tenant_id, id, policy)
    VALUES (p_tenant, p_policy ->> 'id', p_policy)
    ON CONFLICT (tenant_id, id) DO NOTHING
$$;

-- Compare and switch an alias; NULL lets it fall back to the base model. With p_repin, queued
-- production runs that are pinned to the policy before are pinned to the one after. Returns the
-- change's id; NULL, and nothing is changed, where the alias does not resolve to p_expected (a
-- policy's id, NULL: the base model) or resolves to p_policy already. Until the transaction ends,
-- nobody else switches the alias.
CREATE FUNCTION runtime.switch_alias_v1(
    p_tenant text, p_domain text, p_alias text, p_expected text, p_policy jsonb, p_fallback jsonb,
    p_by text, p_reason text, p_repin boolean
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_before jsonb;
    v_repinned integer := 0;
    v_id bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext(p_tenant || '/' || p_domain || '/' || p_alias));
    SELECT policy INTO v_before FROM runtime.aliases
    WHERE tenant_id = p_tenant AND domain = p_domain AND alias = p_alias FOR UPDATE;
    IF v_before ->> 'id' IS DISTINCT FROM p_expected
       OR v_before ->> 'id' IS NOT DISTINCT FROM p_policy ->> 'id' THEN
        RETURN NULL;
    END IF;
    IF p_policy IS NULL THEN
        DELETE FROM runtime.aliases
        WHERE tenant_id = p_tenant AND domain = p_domain AND alias = p_alias;
    ELSE
        INSERT INTO runtime.aliases (tenant_id, domain, alias, policy, updated_at)
        VALUES (p_tenant, p_domain, p_alias, p_policy, now())
        ON CONFLICT (tenant_id, domain, alias)
        DO UPDATE SET policy = excluded.policy, updated_at = excluded.updated_at;
    END IF;
    IF p_repin THEN
        UPDATE runtime.runs SET policy = coalesce(p_policy, p_fallback)
        WHERE tenant_id = p_tenant AND domain = p_domain AND kind = 'production'
          AND state = 'queued' AND attempts = 0
          AND policy = coalesce(v_before, p_fallback);
        GET DIAGNOSTICS v_repinned = ROW_COUNT;
    END IF;
    INSERT INTO runtime.alias_changes
        (tenant_id, domain, alias, before, after, changed_by, reason, repinned)
    VALUES (p_tenant, p_domain, p_alias, v_before, p_policy, p_by, p_reason, v_repinned)
    RETURNING id INTO v_id;
    RETURN v_id;
END $$;

-- ---------------------------------------------------------------- views, version 1

CREATE VIEW runtime.tenants_v1 AS
SELECT tenant_id, name FROM runtime.tenants;

CREATE VIEW runtime.runs_v1 AS
SELECT run.tenant_id, run.id, run.kind, run.domain, run.domain_digest, run.task, run.policy,
       run.policy ->> 'id' AS policy_id, run.sampling, run.state, run.reason, run.answer,
       run.verdict, run.failure, run.usage, run.initial_snapshot, run.attempts, run.created_at,
       run.started_at, run.finished_at, private.expectation
FROM runtime.runs AS run
LEFT JOIN runtime.run_private AS private
       ON private.tenant_id = run.tenant_id AND private.run_id = run.id;

CREATE VIEW runtime.run_files_v1 AS
SELECT tenant_id, run_id, path, content FROM runtime.run_files;

CREATE VIEW runtime.model_calls_v1 AS
SELECT tenant_id, run_id, turn, parent_turn, prompt_length, prompt_hash, prompt_delta, sampled,
       logprobs, finish_reason, temperature, policy_id, template_digest, cached_tokens, trainable,
       seconds
FROM runtime.model_calls;

CREATE VIEW runtime.feedback_v1 AS
SELECT tenant_id, run_id, seq, at, body ->> 'rating' AS rating, body ->> 'outcome' AS outcome,
       body -> 'correction' AS correction, body ->> 'comment' AS comment, body ->> 'by' AS by
FROM runtime.events
WHERE body ->> 'type' = 'feedback';

CREATE VIEW runtime.aliases_v1 AS
SELECT tenant_id, domain, alias, policy, updated_at FROM runtime.aliases;

CREATE VIEW runtime.alias_changes_v1 AS
SELECT tenant_id, id, domain, alias, before, after, changed_by, reason, repinned, at
FROM runtime.alias_changes;
